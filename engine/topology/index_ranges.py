"""Boxes of tensors and the cuts that divide them: arithmetic on plain integers.

FSDP2 cuts like ``torch.chunk``: equal pieces of ``ceil(n / parts)``, the last ones shorter or empty.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["IndexRange", "ShardStep", "bounding_range", "chunk_range", "shard_range"]


@dataclass(frozen=True, order=True)
class IndexRange:
    """The elements ``low <= index < high`` of a tensor, dim by dim."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> "IndexRange":
        """The whole tensor."""
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
        """The slices that cut this box out of the values of ``outer``."""
        bounds = zip(self.low, self.high, outer.low, strict=True)
        return tuple(slice(low - origin, high - origin) for low, high, origin in bounds)

    def with_dim(self, dim: int, start: int, stop: int) -> "IndexRange":
        """The same box but for ``[start, stop)`` along ``dim``."""
        return IndexRange(
            (*self.low[:dim], start, *self.low[dim + 1 :]), (*self.high[:dim], stop, *self.high[dim + 1 :])
        )

    def elements_before(self, rows: "IndexRange") -> int:
        """How many elements of this come before those of some of its rows."""
        return (rows.low[0] - self.low[0]) * math.prod(self.shape[1:]) if self.low else 0

    def intersection(self, other: "IndexRange") -> "IndexRange | None":
        """What both contain; ``None`` if that is nothing."""
        low = tuple(map(max, self.low, other.low))
        high = tuple(map(min, self.high, other.high))
        return IndexRange(low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


@dataclass(frozen=True)
class ShardStep:
    """One step of sharding: ``dim`` cut over the mesh axis ``axis`` in ``parts`` pieces."""

    dim: int
    axis: str
    parts: int


def bounding_range(boxes: Sequence[IndexRange]) -> IndexRange:
    """The smallest box that has all of these inside."""
    lows, highs = zip(*((box.low, box.high) for box in boxes), strict=True)
    return IndexRange(tuple(map(min, *lows, lows[0])), tuple(map(max, *highs, highs[0])))


def chunk_range(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """The ``index``-th of ``parts`` pieces of ``[start, stop)``, as ``torch.chunk`` cuts it."""
    piece = -(-(stop - start) // parts)
    return min(start + index * piece, stop), min(start + (index + 1) * piece, stop)


def shard_range(shape: Sequence[int], cuts: Iterable[ShardStep], coordinate: Mapping[str, int]) -> IndexRange:
    """What a rank at ``coordinate`` (axis -> index) holds of a tensor of ``shape``; ``cuts`` outermost first."""
    box = IndexRange.of(shape)
    for cut in cuts:
        dim = cut.dim
        box = box.with_dim(dim, *chunk_range(box.low[dim], box.high[dim], cut.parts, coordinate[cut.axis]))
    return box
