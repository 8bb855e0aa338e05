"""Names of units, the rows of a worker's parameter that are sent as one tensor: its name, first row and step."""

import torch

__all__ = ["is_slice", "parse_slice", "rows_of", "slice_name"]

# No checkpoint has a module of this name, so a receiver that does not know it fails.
_PREFIX = "__epfsdp2__"


def slice_name(parameter: str, first: int = 0, step: int = 1) -> str:
    """Return the name of the rows ``first::step`` of ``parameter``, e.g. ``__epfsdp2__/model.norm.weight/0/1``."""
    return f"{_PREFIX}/{parameter}/{first}/{step}"


def is_slice(name: str) -> bool:
    """Tell whether a tensor's name is that of a unit."""
    return name.startswith(f"{_PREFIX}/")


def parse_slice(name: str) -> tuple[str, int, int]:
    """Return the parameter, the first row and the step that a unit's name holds.

    Raises:
        ValueError: ``name`` is not the name of a unit.
    """
    if not is_slice(name):
        raise ValueError(f"{name} is not the name of a slice.")
    _, parameter, first, step = name.split("/")
    return parameter, int(first), int(step)


def rows_of(values: torch.Tensor, first: int, step: int) -> tuple[slice, ...]:
    """Return the index of a unit's ``values`` in its parameter; a parameter without dims has one value."""
    return (slice(first, first + step * len(values), step),) if values.dim() else ()
