"""Build the multi-token prediction (MTP) layers of a checkpoint, which transformers' model classes leave out.

A layer is one more decoder layer after the last (https://arxiv.org/abs/2412.19437, section 2.2). From the hidden states
``h_t`` of the final norm and the embedding of the next token, it drafts the token after that one:

    h'_t = eh_proj([enorm(embedding_t+1), hnorm(h_t)])        draft_t = head(shared_head.norm(decoder_layer(h'_t)))

It has the place and the names that it has in checkpoints, ``model.layers.N``. So it is an FSDP unit with experts of its
own, and is loaded, saved and exported like any layer. Embeddings and head are the model's; the copies of them that
checkpoints have are not read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..model.layers import is_mtp, set_mtp_layers
from ..moe.find import ExpertsInfo, find_experts
from ..wrap_forward import wrap_forward

__all__ = ["FAMILIES", "add_mtp_layers", "add_stored_mtp_layers", "install_forward", "policy_experts"]

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Families whose MTP layers follow the decoder's layers, and whose forward stops at ``num_hidden_layers``."""


def add_mtp_layers(model: Any, count: int, dtype: torch.dtype) -> None:
    """Add ``count`` layers to a causal language model of ``FAMILIES``, before anything wraps or shards it.

    The layers have the class of the last decoder layer and the dtype of the model.
    """
    decoder, config = model.get_decoder(), model.config.get_text_config()
    kind, norm, own = type(decoder.layers[-1]), decoder.norm, len(decoder.layers)

    def new_norm() -> nn.Module:
        return type(norm)(config.hidden_size, eps=norm.variance_epsilon)

    fqn = next(name for name, module in model.named_modules() if module is decoder)
    with _one_more_entry(config, own, count), _default_dtype(dtype):
        for index in range(own, own + count):
            layer = kind(config, index)
            layer.enorm, layer.hnorm = new_norm(), new_norm()
            layer.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            layer.shared_head = nn.ModuleDict({"norm": new_norm()})
            decoder.layers.append(layer)
    set_mtp_layers(model, [f"{fqn}.layers.{index}" for index in range(own, own + count)])


def add_stored_mtp_layers(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> None:
    """Add the layers of a run's checkpoint that has tensors of these ``names``."""
    if count := sum(name.endswith(".eh_proj.weight") for name in names):
        add_mtp_layers(model, count, dtype)


def policy_experts(model: nn.Module, plan: Mapping[str, int] | None = None) -> list[ExpertsInfo]:
    """Find the experts modules that the policy's forward runs (``moe/find.py``)."""
    return [info for info in find_experts(model, plan) if not is_mtp(model, info.fqn)]


def install_forward(layer: Any) -> None:
    """Give an MTP layer its forward of ``(hidden, embeddings, *args, **kwargs)``, the first two ``[B, S, D]``.

    Other arguments are the decoder layer's. It returns the input of the head, ``[B, S, D]``.
    """

    def forward(
        decode: Callable[..., Any], hidden: torch.Tensor, embeddings: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        joined = layer.eh_proj(torch.cat([layer.enorm(embeddings), layer.hnorm(hidden)], dim=-1))
        found = decode(joined, *args, **kwargs)
        return layer.shared_head["norm"](found[0] if isinstance(found, tuple) else found)

    wrap_forward(layer, "mtp", forward)


@contextmanager
def _one_more_entry(config: Any, layers: int, count: int) -> Iterator[None]:
    """Lengthen the lists of a config with an entry for each layer, by their last entry."""
    before = {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == layers}
    vars(config).update({name: values + values[-1:] * count for name, values in before.items()})
    try:
        yield
    finally:
        vars(config).update(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
