"""Names of slices: a slice is sent under its parameter's name and its position in that parameter."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch

from ...engine.topology.index_ranges import IndexRange
from .specs import SliceForm, TargetSlice

__all__ = [
    "NamedIndex",
    "as_stored",
    "block_at",
    "is_slice",
    "named_indices",
    "named_values",
    "in_halves",
    "parse_slice",
    "slice_name",
]

# No checkpoint has a module of this name, so a receiver that does not know it fails.
_PREFIX = "__epfsdp2__"
# The name of a slice, and the index of its values inside the block that they are taken from.
NamedIndex = tuple[str, tuple[slice, ...]]


def named_indices(block: IndexRange, slices: Iterable[TargetSlice]) -> list[NamedIndex]:
    """Return the name and the index inside ``block`` of each part of it that a worker keeps.

    Args:
        slices: what the worker keeps of the tensor that ``block`` is part of.
    """
    found = []
    for part in slices:
        shared = block.intersection(part.block)
        if shared is not None:
            corner = part.moved([low - first for low, first in zip(shared.low, part.block.low, strict=True)])
            found.append((slice_name(part.parameter, corner, part.form), shared.slices_in(block)))
    return found


def named_values(
    block: IndexRange, values: torch.Tensor, slices: Iterable[TargetSlice]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parts of a block's ``values`` that a worker keeps, each under its name."""
    for name, inside in named_indices(block, slices):
        yield name, values[inside]


def slice_name(parameter: str, at: Sequence[int], form: SliceForm = "") -> str:
    """Return the name of the slice of ``parameter`` that begins at ``at``, e.g. ``__epfsdp2__/model.norm.weight/0``."""
    return f"{_PREFIX}/{parameter}/{','.join(map(str, at))}" + (f"/{form}" if form else "")


def is_slice(name: str) -> bool:
    """Tell whether a tensor's name is that of a slice."""
    return name.startswith(f"{_PREFIX}/")


def parse_slice(name: str) -> tuple[str, tuple[int, ...], SliceForm]:
    """Return the parameter, the begin index and the form that a slice's name holds.

    Raises:
        ValueError: ``name`` is not the name of a slice.
    """
    prefix, parameter, corner, form = [*name.split("/"), ""][:4]
    if prefix != _PREFIX:
        raise ValueError(f"{name} is not the name of a slice.")
    return parameter, tuple(int(c) for c in corner.split(",") if c), cast(SliceForm, form)


def as_stored(values: torch.Tensor, corner: Sequence[int], form: SliceForm) -> torch.Tensor:
    """Return a slice's values as the parameter that it begins in at ``corner`` stores them."""
    if form == "transposed":
        values = values.transpose(-1, -2)
    elif form == "zeros":
        values = torch.zeros_like(values)
    elif form == "decay":
        values = -torch.exp(values.float())
    extra = max(0, values.dim() - len(corner))
    if math.prod(values.shape[:extra]) == 1:  # leading dims that the parameter lacks
        values = values.reshape(values.shape[extra:])
    return values


def in_halves(values: torch.Tensor, corner: Sequence[int], rows: int) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the blocks, and where each begins, that a parameter stores of a slice of the form ``halves``.

    Args:
        values: rows of a parameter from ``corner`` on, as if its even rows were not before its odd ones.
        rows: of a head; the first head begins at row 0.
    """
    first, last = corner[0], corner[0] + values.shape[0]
    for head in range(first // rows, -(-last // rows)):
        low, high = max(first, head * rows), min(last, (head + 1) * rows)
        for odd in (0, 1):
            start = low + (low + odd) % 2
            if start < high:
                at = head * rows + odd * (rows // 2) + (start - head * rows) // 2
                yield values[start - first : high - first : 2], (at, *corner[1:])


def block_at(corner: Sequence[int], values: torch.Tensor) -> tuple[slice, ...]:
    """Return the index of the block of a parameter that ``values`` fill from ``corner`` on."""
    return tuple(slice(low, low + size) for low, size in zip(corner, values.shape, strict=True))
