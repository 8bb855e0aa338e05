"""Where the elements of a checkpoint's tensors are in a model's parameter.

transformers' converters make a parameter out of a checkpoint's whole tensors. Asked in reverse, for the coordinates of
the parameter's elements, they say where each element is in which tensor. From that a rank reads of each tensor what its
own shard is made of, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..model.hf_convert import converted_together, revert
from ..topology.index_ranges import IndexRange

__all__ = ["SliceCopy", "CheckpointSlice", "find_slices"]


@dataclass(frozen=True)
class SliceCopy:
    """Elements of a box that one tensor of a checkpoint has.

    Args:
        source: where in the tensor.
        order: dims of what is read that are kept, in the order of the parameter's.
        target: where in the values of the box.
    """

    source: tuple[slice, ...]
    order: tuple[int, ...]
    target: tuple[slice | int, ...]

    def copy(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Put what was read from ``source`` where it belongs in the values of the box."""
        dropped = [d for d in range(values.dim()) if d not in self.order]
        kept = sorted(self.order)
        values = values.squeeze(dropped) if dropped else values
        into[self.target] = values.permute([kept.index(d) for d in self.order]).to(into.dtype)


@dataclass(frozen=True)
class CheckpointSlice:
    """One tensor of a checkpoint; each of its dims runs along a dim of the parameter, at equal steps.

    Args:
        name: in the checkpoint; of a stack of experts, that of the first one's.
        shape: of the tensor; of a stack that it has whole, the first size is of the experts that were asked about.
        dims: the parameter's dim that each dim runs along; None for one of size 1, which runs along none.
        steps: in elements of the parameter.
        at: where in the parameter the tensor's first element is.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    steps: tuple[int, ...]
    at: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> "CheckpointSlice":
        """Of a tensor that is the parameter."""
        dims = tuple(d if size > 1 else None for d, size in enumerate(shape))
        return cls(name, shape, dims, (1,) * len(shape), (0,) * len(shape))

    def expected(self, experts: int | None) -> tuple[int, ...]:
        """The tensor's shape in a checkpoint of that many experts."""
        return tuple(
            experts if dim == 0 and experts is not None else size
            for dim, size in zip(self.dims, self.shape, strict=True)
        )

    def part(self, box: IndexRange, size: tuple[int, ...]) -> SliceCopy | None:
        """What it has of a box of the parameter; None if that is nothing.

        Args:
            size: the tensor's own shape.
        """
        source, target = [slice(0, 1)] * len(size), [0] * len(box.low)
        order: list[int] = []
        targets: list[slice | int] = list(target)
        for t, (low, high, at) in enumerate(zip(box.low, box.high, self.at, strict=True)):
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
    """The tensors of the family's checkpoints that a parameter is made of.

    Args:
        shape: of the whole parameter.
        is_stack: its first dim counts experts: only the first two are asked about, and of tensors that are one
            expert's only the first one's are returned.

    Returns:
        None where it is not a mere arrangement of the elements (something is computed, or split over two dims), or
        they share a tensor with another parameter's.
    """
    if len(converted_together(model, name)) > 1:
        return None
    asked = (min(2, shape[0]), *shape[1:]) if is_stack else tuple(shape)
    found: dict[str, list[torch.Tensor]] = {}
    for dim, size in enumerate(asked):
        places = torch.arange(size).view([-1 if d == dim else 1 for d in range(len(asked))]).expand(asked)
        for tensor, values in revert(model, name, places).items():
            found.setdefault(tensor, []).append(values)
    regions = [_region(tensor, coordinates, asked) for tensor, coordinates in found.items()]
    if any(region is None for region in regions):
        return None
    known = [region for region in regions if region is not None]
    if sum(torch.Size(region.shape).numel() for region in known) != torch.Size(asked).numel():
        return None
    return [region for region in known if not (is_stack and 0 not in region.dims and region.at[0] > 0)]


def _region(name: str, coordinates: Sequence[torch.Tensor], asked: tuple[int, ...]) -> CheckpointSlice | None:
    """The region of a tensor, of whose elements ``coordinates`` says, dim by dim, where in the parameter they are."""
    if len(coordinates) != len(asked) or any(c.dtype != torch.int64 or not c.numel() for c in coordinates):
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
    region = CheckpointSlice(name, shape, tuple(dims), tuple(steps), at)
    used = [dim for dim in dims if dim is not None]
    if len(set(used)) != len(used) or min(steps, default=1) < 1:
        return None
    for t, places in enumerate(coordinates):
        wanted = torch.tensor(at[t])
        if t in dims:
            d = dims.index(t)
            line = at[t] + steps[d] * torch.arange(shape[d])
            wanted = line.view([-1 if other == d else 1 for other in range(len(shape))])
        if not bool((places == wanted).all()) or int(places.max()) >= asked[t]:
            return None
    return region
