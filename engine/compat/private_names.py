"""Look up private names of libraries, which differ between versions.

Only the compat files use it (``transformers_names.py``, ``rollout/vllm/compat.py``).
"""

import importlib
import importlib.metadata
from typing import Any

__all__ = ["MissingNameError", "look_up"]


class MissingNameError(RuntimeError):
    """A library has changed a private name that this package needs; not an ``ImportError``, which some swallow."""


def look_up(*places: str, known: str, instead: str = "") -> Any:
    """Return the first of several ``module:name`` that exists.

    Args:
        known: versions of the library that have one of them.
        instead: what works with a version that has none.

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
