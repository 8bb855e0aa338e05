"""Rotary embeddings whose frequencies depend on the length of a sequence, computed for each sequence by itself.

For longrope and dynamic NTK transformers chooses frequencies by the largest position of a call, and keeps them for
later calls (``dynamic_rope_update``). A result would depend on the longest sequence of this or an earlier micro-batch.
vLLM chooses once, by its ``max_model_len``, because it can't rotate cached keys again; its trainer uses that length.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..model.families import SCALED_BY_LENGTH
from ..wrap_forward import wrap_forward
from .attention import Spans

__all__ = ["embed_apart", "positions_line", "rotary_by_length", "rotary_kinds"]


def rotary_kinds(module: nn.Module) -> dict[str | None, str]:
    """Return transformers' rope types of a rotary embedding, by layer type."""
    kinds = getattr(module, "rope_type", None) or {}
    return kinds if isinstance(kinds, dict) else {None: kinds}


def rotary_by_length(model: nn.Module) -> list[Any]:
    """Find the rotary embeddings of a model, which may be on the meta device, that depend on the length."""

    def depends(module: nn.Module) -> bool:
        kinds = set(rotary_kinds(module).values())
        if type(module).__name__ in SCALED_BY_LENGTH:
            return kinds != {"default"}
        return any("dynamic" in kind or kind == "longrope" for kind in kinds)

    return [module for module in model.modules() if depends(module)]


def embed_apart(model: nn.Module, spans: Spans, longest: int = 0) -> None:
    """Choose the frequencies of each sequence's rotary embeddings by its own length, or if not 0, by ``longest``."""
    for module in rotary_by_length(model):
        embed = functools.partial(_embed, module, spans, longest)
        wrap_forward(module, "positions", torch.compiler.disable(embed))


def positions_line(model: nn.Module, longest: int) -> str:
    """Format which length decides, for the log; empty if none does."""
    kinds = sorted({kind for module in rotary_by_length(model) for kind in rotary_kinds(module).values()})
    rule = f"of {longest} tokens, as in the rollout" if longest else "of each sequence's own length"
    return f"positions ({', '.join(kinds)}): frequencies {rule}" if kinds else ""


def _embed(
    module: Any,
    spans: Spans,
    longest: int,
    forward: Callable[..., Any],
    x: torch.Tensor,
    position_ids: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the module's forward on ``position_ids [..., B, S]`` by sequence; returns tensors ``[..., B, S, D]``."""

    def alone(positions: torch.Tensor) -> Any:
        fresh = copy.copy(module)  # no call keeps frequencies for the next
        fresh._buffers = {name: buffer.clone() for name, buffer in module._buffers.items()}
        if longest and type(module).__name__ in SCALED_BY_LENGTH:  # transformers 5.19 always takes short factors
            fresh.rope_init_fn = lambda config, *_: module.rope_init_fn(config, x.device, seq_len=longest)
        return type(module).forward(fresh, x, positions, *args, **kwargs)

    def joined(parts: Sequence[Any], dim: int) -> Any:
        return tree_map(lambda *tensors: torch.cat(tensors, dim), *parts)

    if longest:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), longest - 1)
        return tree_map(lambda made: made[..., :-1, :], alone(torch.cat([position_ids, last], -1)))
    tokens = position_ids.shape[-1]
    row = spans() or [(0, tokens)]
    # A mixer that is called per sequence may ask for the positions of one sequence.
    lengths = [end - start for start, end in row] if row[-1][1] == tokens else [tokens]
    rows = [[alone(part) for part in each.split(lengths, -1)] for each in position_ids.split(1, -2)]
    return joined([joined(parts, -2) for parts in rows], -3)
