"""Compressed attention (DeepSeek-V4) of sequences that are shorter than its windows, or that ranks share.

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
from .shared_mixers import SharedKeys

__all__ = ["use_every_compressor"]


def use_every_compressor(model: nn.Module) -> None:
    """Make compressors compute at least one window, whose key is left out where the sequence is shorter.

    Then every rank calls the same modules in the same order. The parameters have gradients, of zeros if no sequence has
    a window.
    """
    for name, module in model.named_modules():
        if hasattr(module, "compress_rate") and name.rpartition(".")[2] == "compressor":
            wrap_forward(module, "windows", functools.partial(_compress, module.compress_rate))


def _compress(
    window: int, forward: Callable[..., Any], hidden: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return keys ``[B, 1, windows, D]`` and their mask; tensors among the arguments are ``[B, S, ...]``."""
    keys = next((arg for arg in args if isinstance(arg, SharedKeys)), None)
    length = hidden.shape[1] if keys is None else keys.length
    repeat = functools.partial(_repeat_last, window if length < window else 2)
    if length < window:
        args = tuple(None if arg is keys else arg for arg in args)
        compressed, _ = forward(*tree_map_only(torch.Tensor, repeat, (hidden, *args)))
        return compressed[:, :, :0] + 0 * compressed.sum(), None
    if keys is None:
        return forward(hidden, *args)
    keys.window = window
    # A single query is taken for the last token of the sequence, which sees all keys.
    compressed, mask = forward(*tree_map_only(torch.Tensor, repeat, (hidden, *args)))
    return compressed, None if mask is None else mask[:, :, : hidden.shape[1]]


def _repeat_last(least: int, tensor: torch.Tensor) -> torch.Tensor:
    """Repeat the last token until there are ``least``."""
    times = max(0, least - tensor.shape[1])
    return torch.cat([tensor, tensor[:, -1:].repeat_interleave(times, dim=1)], dim=1)
