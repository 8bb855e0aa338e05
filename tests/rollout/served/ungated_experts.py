"""Lets vLLM's CPU build hold experts without a gate, which it has no kernel for but loads like any other."""

import contextlib

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

__all__ = ["allow"]

_check = FusedMoEConfig.__post_init__


def _without_refusal(self) -> None:
    with contextlib.suppress(NotImplementedError):  # the last thing that it does
        _check(self)


def allow() -> None:
    """Create models with such experts in this process from now on."""
    FusedMoEConfig.__post_init__ = _without_refusal
