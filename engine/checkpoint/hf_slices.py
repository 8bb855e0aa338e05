"""Find where the elements of a parameter are in the tensors of a Hugging Face checkpoint.

transformers' converters make a parameter from whole tensors of a checkpoint. Run in reverse on the coordinates of the
parameter's elements, they tell where each element is in which tensor. So a rank reads from each tensor only the
elements of its own shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..model.hf_convert import converted_together, revert
from ..topology.index_ranges import IndexRange

__all__ = ["SliceCopy", "CheckpointSlice", "find_slices"]


@dataclass(frozen=True)
class SliceCopy:
    """A copy of some elements of one checkpoint tensor into an index range of a parameter.

    Args:
        source: the slices of the tensor.
        order: the dims of the read values that are kept, in the order of the parameter's dims.
        target: the slices of the range's values.
    """

    source: tuple[slice, ...]
    order: tuple[int, ...]
    target: tuple[slice | int, ...]

    def of_expert(self, expert: int, rows: int) -> "SliceCopy":
        """Return the copy of an expert whose rows are after those of the experts before it; this is the first one's."""
        first = self.source[0]
        moved = slice(first.start + expert * rows, first.stop + expert * rows)
        return replace(self, source=(moved, *self.source[1:]))

    def copy(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Copy values that were read from ``source`` into the values of the range."""
        dropped = [d for d in range(values.dim()) if d not in self.order]
        kept = sorted(self.order)
        values = values.squeeze(dropped) if dropped else values
        into[self.target] = values.permute([kept.index(d) for d in self.order]).to(into.dtype)


@dataclass(frozen=True)
class CheckpointSlice:
    """One tensor of a checkpoint as a strided slice of a parameter: each of its dims runs along one of the parameter's.

    Args:
        name: its name in the checkpoint; for tensors of single experts, that of the first expert.
        shape: its shape; for a stack of experts, the first size is the number of experts that ``find_slices`` probed.
        dims: the parameter's dim that each dim runs along; None for a dim of size 1.
        steps: the stride along each of these, in elements of the parameter.
        at: the index in the parameter of the tensor's first element.
        rows: of each expert, in a tensor that has the rows of all experts one after the other; then all else describes
            those of the first. 0 elsewhere.
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
        if self.rows and experts is not None:
            return (experts * self.rows, *self.shape[1:])
        return tuple(
            experts if dim == 0 and experts is not None else size
            for dim, size in zip(self.dims, self.shape, strict=True)
        )

    def copy_into(self, wanted: IndexRange, size: tuple[int, ...]) -> SliceCopy | None:
        """Return the copy into an index range of the parameter; None if the tensor has nothing of it.

        Args:
            size: the tensor's actual shape.
        """
        source, target = [slice(0, 1)] * len(size), [0] * len(wanted.low)
        order: list[int] = []
        targets: list[slice | int] = list(target)
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


def find_slices(model: Any, name: str, shape: Sequence[int], is_stack: bool) -> list[CheckpointSlice] | None:
    """Find the tensors of the family's checkpoints that a parameter is made of.

    Args:
        shape: the shape of the whole parameter.
        is_stack: whether its first dim counts experts. Then only the first two experts are probed, and of the tensors
            of single experts only those of the first are returned.

    Returns:
        None if the parameter is no mere rearrangement of elements (values are computed, or a dim is split over two), or
        shares a tensor with another parameter.
    """
    if len(converted_together(model, name)) > 1:
        return None
    probed = (min(2, shape[0]), *shape[1:]) if is_stack else tuple(shape)
    found = _probe(model, name, probed)
    slices = [_as_slice(tensor, coordinates, probed) for tensor, coordinates in found.items()]
    if None in slices and is_stack and probed[0] > 1:
        probed = (1, *shape[1:])
        slices = [_as_rows(tensor, of, probed, found) for tensor, of in _probe(model, name, probed).items()]
    if any(piece is None for piece in slices):
        return None
    known = [piece for piece in slices if piece is not None]
    if sum(torch.Size(piece.shape).numel() for piece in known) != torch.Size(probed).numel():
        return None
    return [piece for piece in known if not (is_stack and 0 not in piece.dims and piece.at[0] > 0)]


def _probe(model: Any, name: str, probed: tuple[int, ...]) -> dict[str, list[torch.Tensor]]:
    """Return by the name of a checkpoint's tensor, dim by dim of the parameter, the index in it of each element."""
    found: dict[str, list[torch.Tensor]] = {}
    for dim, size in enumerate(probed):
        places = torch.arange(size).view([-1 if d == dim else 1 for d in range(len(probed))]).expand(probed)
        for tensor, values in revert(model, name, places).items():
            found.setdefault(tensor, []).append(values)
    return found


def _as_rows(
    name: str, first: Sequence[torch.Tensor], probed: tuple[int, ...], found: dict[str, list[torch.Tensor]]
) -> CheckpointSlice | None:
    """Describe a tensor that has the rows of one expert after those of another.

    Args:
        first: as ``coordinates`` of ``_as_slice``, of the first expert alone.
        found: by name, those of the first two.
    """
    piece, both = _as_slice(name, first, probed), found.get(name, ())
    if piece is None or len(both) != len(first) or not first[0].dim():
        return None
    rows = piece.shape[0]
    second = [first[0] + 1, *first[1:]]
    if all(torch.equal(b, torch.cat([one, two])) for b, one, two in zip(both, first, second, strict=True)):
        return replace(piece, rows=rows)
    return None


def _as_slice(name: str, coordinates: Sequence[torch.Tensor], probed: tuple[int, ...]) -> CheckpointSlice | None:
    """Describe a tensor of whose elements ``coordinates`` holds, dim by dim, the index in the parameter."""
    if len(coordinates) != len(probed) or any(c.dtype != torch.int64 or not c.numel() for c in coordinates):
        return None
    first = coordinates[0]
    shape, origin = tuple(first.shape), (0,) * first.dim()
    at = tuple(int(c[origin]) for c in coordinates)
    dims: list[int | None] = []
    steps: list[int] = []
    for d, size in enumerate(shape):
        if size == 1:
            dims.append(None)
            steps.append(1)
            continue
        second = tuple(int(d == other) for other in range(len(shape)))
        moved = {t: int(c[second]) - at[t] for t, c in enumerate(coordinates) if int(c[second]) != at[t]}
        if len(moved) != 1:
            return None
        ((dim, step),) = moved.items()
        dims.append(dim)
        steps.append(step)
    piece = CheckpointSlice(name, shape, tuple(dims), tuple(steps), at)
    used = [dim for dim in dims if dim is not None]
    if len(set(used)) != len(used) or min(steps, default=1) < 1:
        return None
    for t, places in enumerate(coordinates):
        wanted = torch.tensor(at[t])
        if t in dims:
            d = dims.index(t)
            line = at[t] + steps[d] * torch.arange(shape[d])
            wanted = line.view([-1 if other == d else 1 for other in range(len(shape))])
        if not bool((places == wanted).all()) or int(places.max()) >= probed[t]:
            return None
    return piece
