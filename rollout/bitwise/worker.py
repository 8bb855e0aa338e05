"""Install the shared operators in a vLLM worker, before it builds its model."""

from typing import Any

import torch

from . import backend, layers, sampler
from .settings import why_not

__all__ = ["install"]


def install(config: Any) -> None:
    """Replace vLLM's layers, its attention backend and its sampler's log-probs in this process.

    Raises:
        RuntimeError: this vLLM, or its config, was not shown to compute the trainer's bits.
    """
    if why := why_not(config):
        raise RuntimeError(f"engine.rollout_bitwise=True: {why}")
    torch.set_num_threads(1)
    layers.register()
    backend.register()
    sampler.install()
