"""The loss of multi-token prediction layers: a cross-entropy with the policy's own distribution.

The first layer sees the hidden states of token ``t`` and the embedding of ``t + 1``, and drafts ``t + 2``. Its target
is the policy's distribution of that token, from the hidden states of ``t + 1``. Each further layer sees the output of
the one before, and drafts one token later. Hidden states, embeddings and head are detached, so the policy's gradients
are those without these layers. A head of a layer's own is an FSDP unit, whose forward computes the loss.

The layers run inside the head's forward, where FSDP has gathered the head's weight. Attention masks, rotary embeddings
and other arguments are those of a decoder layer, so packed rows and sequence parallelism need no code here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..fsdp.ulysses import gather_parts
from ..head.causal_head import CausalHead
from ..head.soft_cross_entropy import soft_cross_entropy
from ..model.layers import decoder_layers, mtp_heads
from ..wrap_forward import wrap_forward
from .layers import draft_layers, install_forward, layout_of, logits_divisor, policy_layer

__all__ = ["DraftLoss"]

_NOT_PASSED = ("hidden_states", "past_key_values", "cache")


@dataclass
class _Forward:
    """A watched forward: its arguments, the states that its layers have passed, and its result."""

    wanted: Sequence[torch.Tensor]
    starts: torch.Tensor
    embeddings: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    state: torch.Tensor | None = None  # in place of the head's input: DeepSeek-V4's streams, Step-3.7's before the norm
    arguments: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    found: tuple[torch.Tensor, torch.Tensor] | None = None


class DraftLoss:
    """Computes the loss of a model's MTP layers in each forward after ``watch``; install it before sharding.

    Args:
        head: the model's, already wrapped.
        sp_group: ranks that share packed rows; None where none do.
    """

    def __init__(self, model: Any, head: CausalHead, sp_group: dist.ProcessGroup | None):
        self._head, self._sp_group = head, sp_group
        layers = draft_layers(model)
        self._layers = [[model.get_submodule(name) for name in names] for names in layers]
        self._now: _Forward | None = None
        self._heads = [model.get_submodule(name) for name in mtp_heads(model)] or [None] * len(layers)
        self._layout = layout_of(model)
        first = model.get_submodule(decoder_layers(model)[0])
        first.register_forward_pre_hook(self._see_embeddings, with_kwargs=True)
        self._like = [policy_layer(model, names[0]) for names in layers]
        for layer in dict.fromkeys(self._like):
            layer.register_forward_pre_hook(self._see_arguments, with_kwargs=True)
        decoder, self._divisor = model.get_decoder(), logits_divisor(model)
        if hasattr(decoder, "hc_head"):
            decoder.hc_head.register_forward_pre_hook(self._see_input)
        elif self._layout.reads_raw:
            decoder.norm.register_forward_pre_hook(self._see_input)
        elif self._divisor != 1:
            decoder.norm.register_forward_hook(self._see_norm)
        output = model.get_output_embeddings()
        wrap_forward(output, "mtp", self._forward)
        for names in layers:
            install_forward(model, names)
        for own in filter(None, self._heads):
            wrap_forward(own, "mtp", partial(_with_own_head, own))

    @property
    def depth(self) -> int:
        """Number of layers, so of tokens drafted after the next one."""
        return len(self._layers)

    def watch(self, wanted: Sequence[torch.Tensor], starts: torch.Tensor) -> None:
        """Compute the loss of the next forward.

        Args:
            wanted: for each layer, bool ``[s]``: whether its draft from this rank's position counts.
            starts: bool ``[s]``: whether a position is its sequence's first (``MtpLayout.masks_first``).
        """
        self._now = _Forward(wanted, starts)

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the sum of the losses, and the number of drafts with the policy's mode; None without ``watch``."""
        now, self._now = self._now, None
        return None if now is None else now.found

    def _see_embeddings(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._now is not None:
            embeddings = (args[0] if args else kwargs["hidden_states"]).detach()
            self._now.embeddings = embeddings[:, :, 0] if embeddings.dim() == 4 else embeddings  # one of equal streams

    def _see_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._now is not None:
            named = {name: value for name, value in kwargs.items() if name not in _NOT_PASSED}
            self._now.arguments[module] = args[1:], named

    def _see_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._now is not None:
            self._now.state = args[0].detach()

    def _see_norm(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if self._now is not None:
            self._now.state = output.detach()

    def _forward(self, forward: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        output = forward(hidden)
        if self._now is not None:
            self._now.found = self._losses(self._now, hidden.detach())
        return output

    def _losses(self, now: _Forward, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias = self._head.parameters()
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        asked, state = self._head.wanted, hidden if now.state is None else now.state
        temperature = hidden.new_ones(hidden.shape[1]) if asked is None else asked.temperature.reshape(-1)
        losses, agreed = [], []
        layers = zip(self._layers, self._like, self._heads, now.wanted, strict=True)
        for ahead, (layer, like, own_head, wanted) in enumerate(layers, start=1):
            embeddings = self._ahead(now.embeddings, ahead).to(state.dtype)
            if self._layout.masks_first:
                embeddings = embeddings.masked_fill(now.starts[None, :, None], 0)
            args, kwargs = now.arguments[like]
            for block in layer:
                state = block(state, embeddings, *args, **kwargs)
            state, draft = state
            draft = draft if self._divisor == 1 else draft / self._divisor
            target = self._ahead(hidden, ahead)
            compared = soft_cross_entropy if own_head is None else own_head
            each, agrees = compared(draft[0], target[0], weight, bias, temperature)
            losses.append(torch.where(wanted, each, 0).sum())
            agreed.append((agrees & wanted).sum())
        return torch.stack(losses).sum(), torch.stack(agreed).sum()

    def _ahead(self, row: torch.Tensor, count: int) -> torch.Tensor:
        """Return for each position the states ``count`` positions later in the row ``[1, s, D]``."""
        if self._sp_group is None:
            return row.roll(-count, dims=1)
        size, rank = dist.get_world_size(self._sp_group), dist.get_rank(self._sp_group)
        firsts = gather_parts(row[0, :count], self._sp_group).view(size, count, -1)
        return torch.cat([row[:, count:], firsts[(rank + 1) % size][None]], dim=1)


def _with_own_head(
    head: Any,
    forward: Callable[..., Any],
    draft: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take a head's forward: the soft cross-entropy of drafts that have this head."""
    return soft_cross_entropy(draft, target, weight, bias, temperature, draft_weight=head.weight)
