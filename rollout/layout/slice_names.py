"""The names under which a worker's parameters are sent, whole or every n-th row."""

__all__ = ["is_slice", "parse_slice", "slice_name"]

# No checkpoint has a module of this name, so a receiver that does not know it fails.
_PREFIX = "__epfsdp2__/"


def slice_name(parameter: str, first: int = 0, step: int = 1) -> str:
    """Return the name of rows ``first::step`` of a parameter, e.g. ``__epfsdp2__/model.norm.weight/0/1``."""
    return f"{_PREFIX}{parameter}/{first}/{step}"


def is_slice(name: str) -> bool:
    """Tell whether a tensor's name is that of a worker's parameter."""
    return name.startswith(_PREFIX)


def parse_slice(name: str) -> tuple[str, int, int]:
    """Return the parameter, the first row and the step that a name holds.

    Raises:
        ValueError: ``name`` is not one of ``slice_name``.
    """
    if not is_slice(name):
        raise ValueError(f"{name} is not the name of a worker's parameter.")
    parameter, first, step = name.removeprefix(_PREFIX).rsplit("/", 2)
    return parameter, int(first), int(step)
