"""How a slice of a vLLM parameter is called on its way to a worker: both ends' side of one name."""

from collections.abc import Sequence

__all__ = ["is_slice", "parse_slice", "slice_name"]

# No checkpoint has such a name, so a receiver that does not know it fails: there is no such module.
_MARK = "__epfsdp2__"


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
