"""What vLLM has no setting for: its CPU build, and defects of its reload."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["wrap"]


def wrap(owner: Any, name: str, make: Callable[[Any], Any], unless: str = "") -> None:
    """Replace a function of ``owner`` by ``make(function)``, once; not where there is none or its source has a word."""
    stock = getattr(owner, name, None)
    if stock is None or hasattr(stock, "__wrapped__") or (unless and unless in inspect.getsource(stock)):
        return
    setattr(owner, name, functools.wraps(stock)(make(stock)))
