"""Lets vLLM's CPU build hold the weights of latent attention and of an indexer, which it can't compute with."""

from typing import Any

import torch
from vllm.model_executor.models import deepseek_v2

__all__ = ["allow"]


class _Hollow(torch.nn.Module):
    """Takes the place of a module without parameters of its own; needs no kernel and no cache."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()


def allow() -> None:
    """Create models with latent attention in this process from now on."""
    deepseek_v2.MultiHeadLatentAttentionWrapper = _Hollow
    deepseek_v2.DeepseekV32IndexerCache = _Hollow
