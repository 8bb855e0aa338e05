"""Slices of vLLM's parameters on their way to a worker, and how they are called: both ends' side of one name."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from ...engine.topology.index_ranges import IndexRange
from .vllm_layout import Need

__all__ = ["Place", "is_slice", "parse_slice", "placed", "places", "slice_name"]

# No checkpoint has such a name, so a receiver that does not know it fails: there is no such module.
_MARK = "__epfsdp2__"
# The name under which a part of a box is handed over, and where in the box that is.
Place = tuple[str, tuple[slice, ...]]


def places(box: IndexRange, needs: Iterable[Need]) -> list[Place]:
    """What a worker needs of a box: the name that says where each part goes, and where in the box that is.

    Args:
        needs: of the tensor that the box is of.
    """
    found = []
    for need in needs:
        shared = box.intersection(need.box)
        if shared is not None:
            dropped = len(shared.low) - len(need.at)
            begins = zip(need.at, shared.low[dropped:], need.box.low[dropped:], strict=True)
            corner = [at + low - need_low for at, low, need_low in begins]
            found.append((slice_name(need.parameter, corner), shared.slices_in(box)))
    return found


def placed(box: IndexRange, values: torch.Tensor, needs: Iterable[Need]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a worker needs of the values of a box, each part under its name."""
    for name, inside in places(box, needs):
        yield name, values[inside]


def slice_name(parameter: str, at: Sequence[int]) -> str:
    """The name of what goes to ``parameter`` from corner ``at`` on, e.g. ``__epfsdp2__/model.norm.weight/0``."""
    return f"{_MARK}/{parameter}/{','.join(map(str, at))}"


def is_slice(name: str) -> bool:
    return name.startswith(f"{_MARK}/")


def parse_slice(name: str) -> tuple[str, tuple[int, ...]]:
    """Parameter and corner of a slice's name.

    Raises:
        ValueError: if it is no such name.
    """
    mark, parameter, corner = name.split("/")
    if mark != _MARK:
        raise ValueError(f"{name} is not the name of a slice.")
    return parameter, tuple(int(c) for c in corner.split(",") if c)
