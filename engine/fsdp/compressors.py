"""Gradients of compressed attention (DeepSeek-V4) on ranks whose sequences are all shorter than its windows.

A compressor makes one key of each window of tokens. Without a whole window it calls no norm, and its parameters have no
gradient. Other ranks gather that norm and reduce those gradients, so FSDP's collectives would not match.
"""

from typing import Any

import torch
from torch import nn

__all__ = ["use_every_compressor"]


def use_every_compressor(model: nn.Module) -> None:
    """Make each compressor call its norms and give its parameters a gradient, zero where it makes no key."""
    for name, module in model.named_modules():
        if hasattr(module, "compress_rate") and name.rpartition(".")[2] == "compressor":
            module.register_forward_hook(_use, with_kwargs=True)


def _use(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any] | None:
    keys, *others = output  # [B, 1, windows, D]
    if keys.shape[2]:
        return None
    token = (args[0] if args else kwargs["hidden_states"])[:, :1]
    # FSDP reduces a unit's gradients when those of its inputs are there, so the norm's input is the token's.
    unused = module.kv_norm(module.kv_proj(token)[..., : module.head_dim]).sum() + module.gate_proj(token).sum()
    if (indexer := getattr(module, "indexer", None)) is not None:  # it has no gradient on any rank
        with torch.no_grad():
            indexer.kv_norm(keys.new_zeros(1, 1, indexer.head_dim))
    return (keys + 0 * (unused + module.position_bias.sum()), *others)
