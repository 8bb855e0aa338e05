"""Index ranges of tensors, and steps of sharding, as arithmetic on integers.

FSDP2 shards like ``torch.chunk``: equal chunks of ``ceil(n / parts)``, the last ones shorter or empty.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["IndexRange", "ShardStep", "bounding_range", "chunk_range", "shard_ranges", "slices_in_shard"]


@dataclass(frozen=True, order=True)
class IndexRange:
    """The elements ``low <= index < high`` of a tensor, dim by dim."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> "IndexRange":
        """Return the range of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in zip(self.low, self.high, strict=True))

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.low, self.high))

    def slices_in(self, outer: "IndexRange") -> tuple[slice, ...]:
        """Return the slices that select this range from a tensor that holds the values of ``outer``."""
        bounds = zip(self.low, self.high, outer.low, strict=True)
        return tuple(slice(low - origin, high - origin) for low, high, origin in bounds)

    def with_dim(self, dim: int, start: int, stop: int) -> "IndexRange":
        """Return this range with ``[start, stop)`` along ``dim``."""
        low, high = list(self.low), list(self.high)
        low[dim], high[dim] = start, stop
        return IndexRange(tuple(low), tuple(high))

    def intersection(self, other: "IndexRange") -> "IndexRange | None":
        """Return the range that both contain, or None if it is empty."""
        low = tuple(map(max, self.low, other.low))
        high = tuple(map(min, self.high, other.high))
        return IndexRange(low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


@dataclass(frozen=True)
class ShardStep:
    """One step of sharding: ``dim`` is split over the mesh axis ``axis`` into ``parts`` chunks.

    ``split_factor`` (as in DTensor's ``_StridedShard``) first divides the dim into equal parts, e.g. gate and up. Each
    part is split, and a rank holds one chunk of each.
    """

    dim: int
    axis: str
    parts: int
    split_factor: int = 1


def bounding_range(ranges: Sequence[IndexRange]) -> IndexRange:
    """Return the smallest range that contains all of these."""
    lows, highs = [r.low for r in ranges], [r.high for r in ranges]
    return IndexRange(tuple(map(min, zip(*lows, strict=True))), tuple(map(max, zip(*highs, strict=True))))


def chunk_range(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Return the bounds of the ``index``-th of ``parts`` chunks of ``[start, stop)``, as in ``torch.chunk``."""
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def shard_ranges(
    shape: Sequence[int], steps: Iterable[ShardStep], coordinate: Mapping[str, int]
) -> tuple[IndexRange, ...]:
    """Return a tensor's ranges on the rank at ``coordinate`` (axis -> index); ``steps`` are outermost first.

    There is one range, unless a step has a ``split_factor``. The rank's shard is then their concatenation along that
    step's dim, in the returned order.
    """
    held = [IndexRange.of(shape)]
    for step in steps:
        dim, index = step.dim, coordinate[step.axis]
        parts = [
            part.with_dim(dim, *chunk_range(part.low[dim], part.high[dim], step.split_factor, i))
            for part, i in itertools.product(held, range(step.split_factor))
        ]
        held = [part.with_dim(dim, *chunk_range(part.low[dim], part.high[dim], step.parts, index)) for part in parts]
    return tuple(held)


def slices_in_shard(block: IndexRange, ranges: Sequence[IndexRange]) -> tuple[slice, ...]:
    """Return the slices that select ``block`` from a shard with these ranges (``shard_ranges``), one of which holds it.

    Raises:
        ValueError: none of them holds it.
    """
    before, dim = 0, 0
    if len(ranges) > 1:
        dim = next(d for d, low in enumerate(ranges[0].low) if low != ranges[1].low[d])
    for held in ranges:
        bounds = zip(block.low, block.high, held.low, held.high, strict=True)
        if all(first <= low and high <= last for low, high, first, last in bounds):
            slices = list(block.slices_in(held))
            if before:
                slices[dim] = slice(slices[dim].start + before, slices[dim].stop + before)
            return tuple(slices)
        before += held.shape[dim]
    raise ValueError(f"{block} is in none of {list(ranges)}.")
