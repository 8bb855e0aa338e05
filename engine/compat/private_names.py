"""Look up private names of libraries, which differ between versions; for the compat files."""

import importlib
import importlib.metadata
from typing import Any

__all__ = ["MissingNameError", "look_up"]


class MissingNameError(RuntimeError):
    """A library has changed a private name; not an ``ImportError``, which some callers swallow."""


def look_up(*places: str, known: str, instead: str = "") -> Any:
    """Return the first existing ``module:name``.

    Args:
        known: versions of the library that have one.
        instead: a setting that works with other versions.

    Raises:
        MissingNameError: none exists.
    """
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    library = places[0].partition(".")[0]
    version = getattr(importlib.import_module(library), "__version__", "of an unknown version")
    raise MissingNameError(
        f"{library} {version} has no {' or '.join(places)}, which epfsdp2 needs. What works: {library} {known}"
        + (f"; or {instead}" if instead else "")
    )
