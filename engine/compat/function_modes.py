"""Take torch's function modes (``TorchFunctionMode``) off for some calls; torch has no public name for it."""

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["without_function_modes"]

_NAMES = ("_get_current_function_mode_stack", "_pop_mode", "_push_mode")
# In a torch without them the modes stay on, which changes no result.
_stack, _pop, _push = (getattr(torch.overrides, name, None) for name in _NAMES)


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Empty the stack of modes, of which the compiler's guards speak too, and fill it again at the end."""
    modes = _stack() if _stack and _pop and _push else []
    for _ in modes:
        _pop()
    try:
        yield
    finally:
        for mode in modes:
            _push(mode)
