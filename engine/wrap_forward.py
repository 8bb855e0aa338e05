"""Replace the forwards of a model's modules, in one order."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["ORDER", "wrap_forward", "wrapped_by"]

ORDER = (
    "parts",
    "norm",
    "saved_modules",
    "log_probs",
    "mtp",
    "packed_sequences",
    "positions",
    "windows",
    "indexer_replay",
    "router_losses",
    "router_replay",
    "shared_experts",
    "autocast",
    "compile",
    "recompute",
)
"""Wrappers, the innermost first.

Router losses, router replay, autocast and compilation are inside ``recompute``, so that a recomputation repeats them.
"""
_WRAPPED_BY = "_epfsdp2_wrapped_by"


def wrap_forward(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Replace a module's ``forward`` by ``function(forward, *args, **kwargs)``.

    The wrapper is on the instance: class and parameter names stay, and hooks run outside of it.

    Args:
        name: of the wrapper, in ``ORDER``.

    Raises:
        RuntimeError: a later wrapper in ``ORDER`` already wraps the forward.
    """
    before, place = wrapped_by(module), ORDER.index(name)
    if any(ORDER.index(other) > place for other in before):
        raise RuntimeError(
            f"{name} can't wrap the forward of {type(module).__name__} after {before[-1]}: the order is {ORDER}."
        )
    module.forward = functools.partial(function, module.forward)  # type: ignore[method-assign]
    setattr(module, _WRAPPED_BY, (*before, name))


def wrapped_by(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's wrappers, the innermost first."""
    return getattr(module, _WRAPPED_BY, ())
