"""Full tensors in buckets of bounded size; one tensor may be in several."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["Chunk", "buckets_of", "bytes_of"]


@dataclass(frozen=True)
class Chunk:
    """Bytes of a tensor from ``start`` on, at byte ``at`` of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    at: int
    nbytes: int


def buckets_of(
    weights: Iterable[tuple[str, torch.Tensor]], limit: int, device: torch.device
) -> Iterator[tuple[list[Chunk], torch.Tensor]]:
    """Pack tensors in order into buckets of ``limit`` bytes; a tensor may continue in the next bucket."""
    bucket, used = torch.empty(limit, dtype=torch.uint8, device=device), 0
    chunks: list[Chunk] = []
    for name, tensor in weights:
        values, start = bytes_of(tensor.detach().contiguous()), 0
        while start < values.numel() or not chunks or chunks[-1].name != name:  # empty tensors get a chunk too
            if used == limit and start < values.numel():
                yield chunks, bucket
                bucket, chunks, used = torch.empty_like(bucket), [], 0
            nbytes = min(values.numel() - start, limit - used)
            bucket[used : used + nbytes] = values[start : start + nbytes]
            chunks.append(Chunk(name, tensor.dtype, tuple(tensor.shape), start, used, nbytes))
            start, used = start + nbytes, used + nbytes
    if chunks:
        yield chunks, bucket[:used]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as its bytes."""
    return tensor.view(-1).view(torch.uint8)
