"""Replace the forwards of a model's modules, in one order."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["ORDER", "wrap_forward", "wrapped_by"]

ORDER = (
    "norm",
    "saved_modules",
    "log_probs",
    "packed_sequences",
    "positions",
    "router_losses",
    "router_replay",
    "shared_experts",
    "autocast",
    "compile",
    "recompute",
)
"""What wraps forwards, the innermost first.

Routers are watched and replayed inside of what is computed again in backward, so that a recomputation takes the same
routes. Autocast and a compiled forward are inside of it too: both are part of what is computed again.
"""
_WRAPPED_BY = "_epfsdp2_wrapped_by"


def wrap_forward(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Have ``function(forward, *args, **kwargs)`` called instead of a module's forward, which it gets as ``forward``.

    On the instance: the module keeps its class and its parameters their names, and hooks stay outside.

    Args:
        name: what wraps it, of ``ORDER``.

    Raises:
        RuntimeError: the forward is wrapped already by what comes later in ``ORDER``.
    """
    before, place = wrapped_by(module), ORDER.index(name)
    if any(ORDER.index(other) > place for other in before):
        raise RuntimeError(
            f"{name} can't wrap the forward of {type(module).__name__} after {before[-1]}: the order is {ORDER}."
        )
    module.forward = functools.partial(function, module.forward)  # type: ignore[method-assign]
    setattr(module, _WRAPPED_BY, (*before, name))


def wrapped_by(module: nn.Module) -> tuple[str, ...]:
    """Return what has wrapped the forward of a module, the innermost first."""
    return getattr(module, _WRAPPED_BY, ())
