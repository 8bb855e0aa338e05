"""The names under which a worker's parameters are sent, whole or every n-th index along an axis."""

import torch

__all__ = ["is_slice", "parse_slice", "slice_name"]

# No checkpoint has a module of this name, so a receiver that does not know it fails.
_PREFIX = "__epfsdp2__/"


def slice_name(parameter: str, first: int = 0, step: int = 1, axis: int = 0) -> str:
    """Return the name of indices ``first::step`` along an axis, e.g. ``__epfsdp2__/model.norm.weight/0/1/0``."""
    return f"{_PREFIX}{parameter}/{first}/{step}/{axis}"


def is_slice(name: str) -> bool:
    """Tell whether a tensor's name is that of a worker's parameter."""
    return name.startswith(_PREFIX)


def parse_slice(name: str, values: torch.Tensor) -> tuple[str, tuple[slice, ...]]:
    """Return the parameter that the name of ``values`` holds, and their index in it.

    Raises:
        ValueError: ``name`` is not one of ``slice_name``.
    """
    if not is_slice(name):
        raise ValueError(f"{name} is not the name of a worker's parameter.")
    parameter, *numbers = name.removeprefix(_PREFIX).rsplit("/", 3)
    first, step, axis = map(int, numbers)
    if not values.dim():
        return parameter, ()
    # Not to the end of the parameter, where a vocabulary has padding.
    return parameter, (*[slice(None)] * axis, slice(first, first + step * values.shape[axis], step))
