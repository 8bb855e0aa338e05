"""Boxes of tensors and the cuts that divide them: arithmetic on plain integers.

FSDP2 cuts like ``torch.chunk``: equal pieces of ``ceil(n / parts)``, the last ones shorter or empty.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Box", "Cut", "box_around", "chunk_range", "cut_box"]


@dataclass(frozen=True, order=True)
class Box:
    """The elements ``low <= index < high`` of a tensor, dim by dim."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Box":
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

    def inside(self, outer: "Box") -> tuple[slice, ...]:
        """The slices that cut this box out of the values of ``outer``."""
        bounds = zip(self.low, self.high, outer.low, strict=True)
        return tuple(slice(low - origin, high - origin) for low, high, origin in bounds)

    def along(self, dim: int, start: int, stop: int) -> "Box":
        """The same box but for ``[start, stop)`` along ``dim``."""
        return Box((*self.low[:dim], start, *self.low[dim + 1 :]), (*self.high[:dim], stop, *self.high[dim + 1 :]))

    def before(self, rows: "Box") -> int:
        """How many elements of this come before those of some of its rows."""
        return (rows.low[0] - self.low[0]) * math.prod(self.shape[1:]) if self.low else 0

    def shared_with(self, other: "Box") -> "Box | None":
        """What both contain; ``None`` if that is nothing."""
        low = tuple(map(max, self.low, other.low))
        high = tuple(map(min, self.high, other.high))
        return Box(low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


@dataclass(frozen=True)
class Cut:
    """One step of sharding: ``dim`` cut over the mesh axis ``axis`` in ``parts`` pieces."""

    dim: int
    axis: str
    parts: int


def box_around(boxes: Sequence[Box]) -> Box:
    """The smallest box that has all of these inside."""
    lows, highs = zip(*((box.low, box.high) for box in boxes), strict=True)
    return Box(tuple(map(min, *lows, lows[0])), tuple(map(max, *highs, highs[0])))


def chunk_range(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """The ``index``-th of ``parts`` pieces of ``[start, stop)``, as ``torch.chunk`` cuts it."""
    piece = -(-(stop - start) // parts)
    return min(start + index * piece, stop), min(start + (index + 1) * piece, stop)


def cut_box(shape: Sequence[int], cuts: Iterable[Cut], coordinate: Mapping[str, int]) -> Box:
    """What a rank at ``coordinate`` (axis -> index) holds of a tensor of ``shape``; ``cuts`` outermost first."""
    box = Box.of(shape)
    for cut in cuts:
        dim = cut.dim
        box = box.along(dim, *chunk_range(box.low[dim], box.high[dim], cut.parts, coordinate[cut.axis]))
    return box
