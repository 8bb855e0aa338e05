"""Full tensors in buckets, broadcast from trainer rank 0 to the rollout."""

import itertools
import math
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch

from ..transport.report import Traffic
from .process_group import SyncGroup

__all__ = ["buckets_of", "receive_buckets", "send_buckets"]

_ALIGNMENT = 16
# Name, dtype and shape of each tensor of a bucket.
Header = list[tuple[str, torch.dtype, tuple[int, ...]]]


def send_buckets(group: SyncGroup, name: str, weights: Iterable[tuple[str, torch.Tensor]], limit: int) -> int:
    """Broadcast tensors on trainer rank 0, with the headers of buckets published under ``name``; return the bytes."""
    sent, pending = 0, None
    buckets = itertools.chain(buckets_of(weights, limit, group.device), [(None, torch.empty(0))])
    for number, (header, bucket) in enumerate(buckets):
        group.publish(f"{name} bucket {number}", header)
        if pending is not None:
            group.finish(pending)
        if header is not None:
            pending, sent = group.broadcast(bucket), sent + bucket.numel()
    return sent


def receive_buckets(group: SyncGroup, name: str, traffic: Traffic) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the tensors on a rollout rank; receives all of them even if the consumer stops early."""
    found = _received(group, name, traffic)
    try:
        for each in found:  # noqa: UP028  (`yield from` would close `found` with this generator)
            yield each
    finally:
        for _ in found:
            pass


def _received(group: SyncGroup, name: str, traffic: Traffic) -> Iterator[tuple[str, torch.Tensor]]:
    pending: tuple[Header, torch.Tensor, Any] | None = None
    for number in itertools.count():
        done, pending, header = pending, None, group.wait_for(f"{name} bucket {number}")
        if header is not None:
            bucket = torch.empty(sum(_nbytes(*each[1:]) for each in header), dtype=torch.uint8, device=group.device)
            pending = header, bucket, group.broadcast(bucket)
        if done is not None:
            header, bucket, work = done
            group.finish(work)
            traffic.received += bucket.numel()
            parts = bucket.split([_nbytes(dtype, shape) for _, dtype, shape in header])
            for (own, dtype, shape), part in zip(header, parts, strict=True):
                yield own, part[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        if pending is None:
            return


def buckets_of(
    weights: Iterable[tuple[str, torch.Tensor]], limit: int, device: torch.device
) -> Iterator[tuple[Header, torch.Tensor]]:
    """Pack tensors in order into buckets of at most ``limit`` bytes; a larger tensor has one of its own."""
    header: Header = []
    bucket, used = torch.empty(0, dtype=torch.uint8, device=device), 0
    for name, tensor in weights:
        nbytes = _nbytes(tensor.dtype, tensor.shape)
        if used + nbytes > bucket.numel():
            if header:
                yield header, bucket[:used]
            header, bucket, used = [], torch.empty(max(limit, nbytes), dtype=torch.uint8, device=device), 0
        into = bucket[used : used + tensor.nbytes].view(tensor.dtype)
        into.view(tensor.shape).copy_(tensor.detach())
        header.append((name, tensor.dtype, tuple(tensor.shape)))
        used += nbytes
    if header:
        yield header, bucket[:used]


def _nbytes(dtype: torch.dtype, shape: Iterable[int]) -> int:
    """Return the bytes that a tensor takes in a bucket, where every one begins aligned."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
