"""Find where the elements of a parameter are in the tensors of a Hugging Face checkpoint.

transformers' converters make a parameter from whole tensors of a checkpoint. Run in reverse on the coordinates of the
parameter's elements, they give the tensor and the position of each element. So a rank reads only the elements of its
own shard.
"""

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..model.hf_convert import converted_together, revert
from ..topology.index_ranges import IndexRange

__all__ = ["CheckpointSlice", "SliceCopy", "SliceFinder"]

_PLACES = torch.int32


@dataclass(frozen=True)
class SliceCopy:
    """A copy of some elements of one checkpoint tensor into an index range of a parameter.

    Args:
        source: the slices of the tensor.
        order: its dims that are kept, in the order of the parameter's dims.
        target: the slices of the range's values.
    """

    source: tuple[slice, ...]
    order: tuple[int, ...]
    target: tuple[slice | int, ...]

    def of_expert(self, expert: int, rows: int) -> "SliceCopy":
        """Return the copy for an expert of a tensor that concatenates experts of ``rows`` rows; this is expert 0's."""
        first = self.source[0]
        moved = slice(first.start + expert * rows, first.stop + expert * rows)
        return replace(self, source=(moved, *self.source[1:]))

    def copy(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Copy values that were read from ``source`` into the values of the range."""
        kept = sorted(self.order)
        dropped = [d for d in range(values.dim()) if d not in kept]
        values = values.squeeze(dropped) if dropped else values
        into[self.target] = values.permute([kept.index(d) for d in self.order]).to(into.dtype)


@dataclass(frozen=True)
class CheckpointSlice:
    """One tensor of a checkpoint as a strided slice of a parameter: each of its dims runs along one parameter dim.

    Args:
        name: its name in the checkpoint; for tensors of single experts, the first expert's.
        shape: its shape; for a stack of experts, the first size is the number of experts that ``SliceFinder`` probed.
        dims: the parameter's dim that each dim runs along; None for a dim of size 1.
        steps: the stride along each of ``dims``, in elements of the parameter.
        at: the index in the parameter of the tensor's first element.
        rows: rows per expert in a tensor that concatenates the rows of all experts, else 0. With ``rows``, all other
            fields describe the first expert.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    steps: tuple[int, ...]
    at: tuple[int, ...]
    rows: int = 0

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> "CheckpointSlice":
        """Describe a tensor that equals the parameter."""
        dims = tuple(d if size > 1 else None for d, size in enumerate(shape))
        return cls(name, shape, dims, (1,) * len(shape), (0,) * len(shape))

    def expected(self, experts: int | None) -> tuple[int, ...]:
        """Return the tensor's shape in a checkpoint with that many experts."""
        if experts is None:
            return self.shape
        if self.rows:
            return (experts * self.rows, *self.shape[1:])
        return tuple(experts if dim == 0 else size for dim, size in zip(self.dims, self.shape, strict=True))

    def copy_into(self, wanted: IndexRange, size: tuple[int, ...]) -> SliceCopy | None:
        """Return the copy of a tensor of shape ``size`` into a range of the parameter; None if it has no part of it."""
        source = [slice(0, 1)] * len(size)
        order: list[int] = []
        targets: list[slice | int] = [0] * len(wanted.low)
        for t, (low, high, at) in enumerate(zip(wanted.low, wanted.high, self.at, strict=True)):
            if t not in self.dims:
                if not low <= at < high:
                    return None
                targets[t] = at - low
                continue
            d = self.dims.index(t)
            step = self.steps[d]
            first = max(0, -(-(low - at) // step))
            stop = min(size[d], -(-(high - at) // step))
            if first >= stop:
                return None
            source[d] = slice(first, stop)
            begin = at + first * step - low
            targets[t] = slice(begin, begin + (stop - first - 1) * step + 1, step)
            order.append(d)
        return SliceCopy(tuple(source), tuple(order), tuple(targets))


class SliceFinder:
    """Finds the tensors of the family's checkpoints that parameters of a model are made of.

    A converter's result depends on itself and the shape alone, so it is probed once for all layers. Parameters whose
    names differ in numbers only get the same answer with other names.
    """

    def __init__(self, model: Any):
        self._model = model
        self._probed: dict[Hashable, tuple[list[str], list[CheckpointSlice] | None]] = {}
        self._keeps: dict[Hashable, bool] = {}

    def find(
        self, name: str, shape: Sequence[int], is_stack: bool, converter: Hashable = None
    ) -> list[CheckpointSlice] | None:
        """Find the tensors of the family's checkpoints that a parameter is made of.

        Args:
            is_stack: whether its first dim counts experts. Then only the first two experts are probed, and tensors of
                single experts are returned for the first alone.
            converter: parameters of one converter share cached results.

        Returns:
            None if the converter computes values or splits a dim into two, or if the parameter shares a tensor with
            another one.
        """
        if len(converted_together(self._model, name)) > 1:
            return None
        probed = (min(2, shape[0]), *shape[1:]) if is_stack else tuple(shape)
        parts = revert(self._model, name, torch.empty(probed, device="meta"))
        # The key has the converted tensors' order and memory layout, so a cached result fits only parameters that
        # convert like the probed one.
        layout = tuple((_unnumbered(n), t.shape, t.stride(), t.storage_offset()) for n, t in parts.items())
        key = (converter, _unnumbered(name), tuple(shape), is_stack, layout)
        if key not in self._probed:
            self._probed[key] = list(parts), _slices_of(self._model, name, probed, is_stack)
        names, slices = self._probed[key]
        moved = dict(zip(names, parts, strict=True))
        return None if slices is None else [replace(piece, name=moved[piece.name]) for piece in slices]

    def keeps_experts(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the tensors of a stack count experts by their first dim, so that some can be converted alone."""
        if len(converted_together(self._model, name)) > 1:
            return False
        key = _unnumbered(name), tuple(shape)
        if key not in self._keeps:
            experts = min(2, shape[0])
            places = torch.arange(experts, dtype=_PLACES).view(-1, *[1] * (len(shape) - 1))
            found = revert(self._model, name, places.expand(experts, *shape[1:]))
            lines = [_as_line(values, experts, 1) for values in found.values()]
            self._keeps[key] = all(line and (line.dim, line.at, line.step) == (0, 0, 1) for line in lines)
        return self._keeps[key]


def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _slices_of(model: Any, name: str, probed: tuple[int, ...], is_stack: bool) -> list[CheckpointSlice] | None:
    slices = _probe(model, name, probed)
    if slices is None and is_stack and probed[0] > 1:
        by_rows = _probe(model, name, probed, probed[0])
        if by_rows is None or any((s.dims[0], s.steps[0], s.at[0]) != (0, 1, 0) for s in by_rows):
            return None
        return [CheckpointSlice(s.name, s.shape[1:], s.dims[1:], s.steps[1:], s.at, s.shape[1]) for s in by_rows]
    return None if slices is None else [s for s in slices if not (is_stack and 0 not in s.dims and s.at[0] > 0)]


def _probe(model: Any, name: str, probed: tuple[int, ...], parts: int = 1) -> list[CheckpointSlice] | None:
    """Describe the checkpoint tensors that come from a parameter; None if they are not slices of it.

    Each tensor's first dim is split into ``parts`` (e.g. experts), as a dim of its own.
    """
    found: dict[str, list[_Line | None]] = {}
    for dim, size in enumerate(probed):
        # Each element's index along ``dim``, expanded along the other dims without memory.
        places = torch.arange(size, dtype=_PLACES).view([-1 if d == dim else 1 for d in range(len(probed))])
        for tensor, values in revert(model, name, places.expand(probed)).items():
            found.setdefault(tensor, []).append(_as_line(values, size, parts))
    slices = [_as_slice(tensor, lines, len(probed)) for tensor, lines in found.items()]
    known = [piece for piece in slices if piece is not None]
    is_whole = len(known) == len(slices) and sum(math.prod(piece.shape) for piece in known) == math.prod(probed)
    return known if is_whole else None


@dataclass(frozen=True)
class _Line:
    """Indices of a tensor's elements along one parameter dim: ``at``, increasing by a step along ``dim``."""

    shape: torch.Size
    at: int
    dim: int | None
    step: int


def _as_line(places: torch.Tensor, size: int, parts: int) -> _Line | None:
    """Describe the indices as a line; None if they are irregular or beyond the parameter's ``size``."""
    if places.dtype != _PLACES or not places.numel():
        return None
    if parts > 1:
        if not places.dim() or len(places) % parts:
            return None
        places = places.unflatten(0, (parts, -1))
    few = places[tuple(slice(1 if stride == 0 else None) for stride in places.stride())]
    at = int(few[(0,) * few.dim()])
    second = [tuple(int(d == other) for other in range(few.dim())) for d in range(few.dim())]
    steps = {d: int(few[second[d]]) - at for d, n in enumerate(few.shape) if n > 1}
    moving = [d for d, step in steps.items() if step]
    if len(moving) > 1:
        return None
    dim, step = (moving[0], steps[moving[0]]) if moving else (None, 1)
    wanted = at + step * torch.arange(1 if dim is None else few.shape[dim], dtype=_PLACES)
    if step < 1 or at < 0 or int(wanted[-1]) >= size:
        return None
    wanted = wanted.view([-1 if d == dim else 1 for d in range(few.dim())])
    return _Line(places.shape, at, dim, step) if bool((few == wanted).all()) else None


def _as_slice(name: str, lines: Sequence[_Line | None], dims: int) -> CheckpointSlice | None:
    """Build the slice of a tensor from its lines, one per parameter dim."""
    known = [line for line in lines if line is not None]
    if len(known) != dims or len({line.shape for line in known}) != 1:
        return None
    shape = tuple(known[0].shape)
    along = [[t for t, line in enumerate(known) if line.dim == d] for d in range(len(shape))]
    if any(len(moved) != (size > 1) for moved, size in zip(along, shape, strict=True)):
        return None
    of = [moved[0] if moved else None for moved in along]
    steps = tuple(1 if t is None else known[t].step for t in of)
    return CheckpointSlice(name, shape, tuple(of), steps, tuple(line.at for line in known))
