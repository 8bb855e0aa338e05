"""Rotary embeddings whose frequencies depend on the length of a sequence, computed for each sequence apart.

Under longrope and dynamic NTK transformers chooses the frequencies by the largest position of a call, and keeps them in
the module for later calls (``dynamic_rope_update``). So a sequence would be rotated by the longest that shares its
micro-batch, or came before it.

A rollout does neither: vLLM chooses once, by the length that it is started with (``max_model_len``), because keys in
its cache can't be rotated again. Its policy is another one than that of each sequence alone, so its trainer follows it.
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
from .attention import Span

__all__ = ["embed_apart", "positions_line", "rotary_by_length", "rotary_kinds"]


def rotary_kinds(module: nn.Module) -> dict[str | None, str]:
    """Return transformers' names of a rotary embedding's kinds, by the layer type that they are for."""
    kinds = getattr(module, "rope_type", None) or {}
    return kinds if isinstance(kinds, dict) else {None: kinds}


def rotary_by_length(model: nn.Module) -> list[Any]:
    """Find the rotary embeddings of a model, which may be on the meta device, that depend on the length."""
    return [module for module in model.modules() if _depends_on_length(module)]


def _depends_on_length(module: Any) -> bool:
    kinds = set(rotary_kinds(module).values())
    if type(module).__name__ in SCALED_BY_LENGTH:
        return kinds != {"default"}
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def embed_apart(model: nn.Module, spans: Callable[[], Sequence[Span] | None], longest: int = 0) -> None:
    """Have each sequence's rotary embeddings depend on nothing but itself, or on ``longest``.

    Args:
        spans: returns where the sequences of the row under way are; None where each row is one.
        longest: tokens of the sequence whose frequencies all get; 0 for each sequence's own.
    """
    for module in rotary_by_length(model):
        embed = functools.partial(_embed, module, spans, longest)
        wrap_forward(module, "positions", torch.compiler.disable(embed))


def positions_line(model: nn.Module, longest: int) -> str:
    """Format which length decides, for the log; empty where none does."""
    kinds = sorted({kind for module in rotary_by_length(model) for kind in rotary_kinds(module).values()})
    rule = f"of {longest} tokens, as in the rollout" if longest else "of each sequence's own length"
    return f"positions ({', '.join(kinds)}): frequencies {rule}" if kinds else ""


def _embed(
    module: Any,
    spans: Callable[[], Sequence[Span] | None],
    longest: int,
    forward: Callable[..., Any],
    x: torch.Tensor,
    position_ids: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute what the module's forward does of ``position_ids [..., B, S]``: tensors ``[..., B, S, D]``."""

    def alone(positions: torch.Tensor) -> Any:
        fresh = copy.copy(module)  # so that no call leaves frequencies to the next
        fresh._buffers = {name: buffer.clone() for name, buffer in module._buffers.items()}
        return type(module).forward(fresh, x, positions, *args, **kwargs)

    if longest:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), longest - 1)
        return tree_map(lambda made: made[..., :-1, :], alone(torch.cat([position_ids, last], -1)))
    tokens = position_ids.shape[-1]
    row = spans() or [(0, tokens)]
    # A mixer that is called for each sequence may ask for the positions of its own.
    lengths = [end - start for start, end in row] if row[-1][1] == tokens else [tokens]
    rows = [[alone(part) for part in each.split(lengths, -1)] for each in position_ids.split(1, -2)]
    return _joined([_joined(parts, -2) for parts in rows], -3)


def _joined(parts: Sequence[Any], dim: int) -> Any:
    return tree_map(lambda *tensors: torch.cat(tensors, dim), *parts)
