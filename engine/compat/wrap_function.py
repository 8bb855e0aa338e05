"""Replace a library's function by a wrapper of it: the one way in which a shim changes a library."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["wrap"]


def wrap(owner: Any, name: str, make: Callable[[Any], Any], unless: str = "") -> None:
    """Replace ``owner.name`` by ``make(owner.name)``, once per process.

    Does nothing if ``owner`` has no such function, or its source contains ``unless``: upstream has mended it.
    """
    stock = getattr(owner, name, None)
    if stock is None or hasattr(stock, "__wrapped__") or (unless and unless in inspect.getsource(stock)):
        return
    setattr(owner, name, functools.wraps(stock)(make(stock)))
