"""Compressed attention (DeepSeek-V4) of sequences that are shorter than its windows.

A compressor makes one key of each window of tokens. Without a whole window it calls no norm, and its parameters have no
gradient. Other ranks gather that norm and reduce those gradients, so FSDP's collectives would not match.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..wrap_forward import wrap_forward

__all__ = ["use_every_compressor"]


def use_every_compressor(model: nn.Module) -> None:
    """Make compressors compute at least one window, whose key is left out where the sequence is shorter.

    Then every rank calls the same modules in the same order. The parameters have gradients, of zeros if no sequence has
    a window.
    """
    for name, module in model.named_modules():
        if hasattr(module, "compress_rate") and name.rpartition(".")[2] == "compressor":
            wrap_forward(module, "windows", functools.partial(_compress, module.compress_rate))


def _compress(window: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Return keys ``[B, 1, windows, D]`` and their mask; tensors among the arguments are ``[B, S, ...]``."""
    hidden = args[0] if args else kwargs["hidden_states"]
    missing = window - hidden.shape[1]
    if missing <= 0:
        return forward(*args, **kwargs)
    args, kwargs = tree_map_only(torch.Tensor, functools.partial(_repeat_last, missing), (args, kwargs))
    keys, _ = forward(*args, **kwargs)
    return keys[:, :, :0] + 0 * keys.sum(), None


def _repeat_last(times: int, tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:, -1:].repeat_interleave(times, dim=1)], dim=1)
