"""Disable torch's function modes (``TorchFunctionMode``) for a block; torch has no public name for it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import overrides

__all__ = ["without_function_modes"]

_overrides: Any = overrides
_NAMES = ("_get_current_function_mode_stack", "_pop_mode", "_push_mode")


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Empty the stack of modes, which the compiler's guards also read, and restore it at the end.

    In a torch without these names the modes stay on, which changes no result.
    """
    known = all(hasattr(_overrides, name) for name in _NAMES)
    modes = _overrides._get_current_function_mode_stack() if known else []
    for _ in modes:
        _overrides._pop_mode()
    try:
        yield
    finally:
        for mode in modes:
            _overrides._push_mode(mode)
