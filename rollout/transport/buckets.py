"""Packs tensors into uint8 buckets, each at a multiple of 16 bytes."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

__all__ = ["Entry", "buckets_of", "tensors_of", "view"]

_ALIGNMENT = 16
Entry = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape and offset of a tensor in a bucket


def buckets_of(
    tensors: Iterable[tuple[str, torch.Tensor]], allocate: Callable[[int], torch.Tensor], start: int = 0
) -> Iterator[tuple[list[Entry], torch.Tensor, bool]]:
    """Copy tensors in order into buckets; yield the entries, the memory, and whether the bucket is the last.

    ``allocate`` returns a uint8 tensor of at least so many bytes. The first ``start`` bytes of a bucket stay free.
    """
    entries: list[Entry] = []
    bucket, at = allocate(start), start
    for name, tensor in tensors:
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        if at + tensor.nbytes > bucket.numel():
            if entries:
                yield entries, bucket[:at], False
            entries, bucket, at = [], allocate(start + tensor.nbytes), start
        view(bucket, at, tensor.shape, tensor.dtype).copy_(tensor.detach())
        entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), at))
        at += tensor.nbytes
    yield entries, bucket[:at], True


def tensors_of(entries: Iterable[Entry], bucket: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views of the tensors in a bucket."""
    for name, dtype, shape, at in entries:
        yield name, view(bucket, at, shape, getattr(torch, dtype))


def view(buffer: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
