"""The names under which a worker's parameters are sent, whole or every n-th index along an axis."""

import torch

__all__ = ["is_slice", "parse_slice", "slice_name"]

# No checkpoint has a module of this name, so a loader that does not know slices fails.
_PREFIX = "__epfsdp2__/"


def slice_name(parameter: str, first: int = 0, step: int = 1, axis: int = 0) -> str:
    """Return the name of indices ``first::step`` along an axis, e.g. ``__epfsdp2__/model.norm.weight/0/1/0``."""
    return f"{_PREFIX}{parameter}/{first}/{step}/{axis}"


def is_slice(name: str) -> bool:
    """Whether a received tensor is a worker's parameter."""
    return name.startswith(_PREFIX)


def parse_slice(name: str, values: torch.Tensor) -> tuple[str, tuple[slice, ...]]:
    """Return the parameter that ``values`` belongs to, and its index there; ``ValueError`` if ``is_slice`` is false."""
    if not is_slice(name):
        raise ValueError(f"{name} is not the name of a worker's parameter.")
    parameter, *numbers = name.removeprefix(_PREFIX).rsplit("/", 3)
    first, step, axis = map(int, numbers)
    if not values.dim():
        return parameter, ()
    # Not to the end of the parameter, because a vocabulary has padding there.
    return parameter, (*[slice(None)] * axis, slice(first, first + step * values.shape[axis], step))
