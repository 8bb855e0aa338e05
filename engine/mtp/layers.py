"""Build the multi-token prediction (MTP) layers of a checkpoint, which transformers' model classes leave out.

A layer is one more decoder layer (https://arxiv.org/abs/2412.19437, section 2.2). From the hidden states ``h_t`` of the
final norm and the embedding of the next token, it drafts the token after that one:

    h'_t = project([norm(embedding_t+1), norm(h_t)])        draft_t = head(norm(decoder_layer(h'_t)))

It has the place and the names that it has in checkpoints: ``model.layers.N`` after the decoder's layers, or ``mtp``
beside the decoder. So it is an FSDP unit with experts of its own, and is loaded, saved and exported like any layer.
Embeddings and head are the model's; the copies of them that checkpoints have are not read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..compat.transformers_names import DECODER
from ..model.layers import decoder_layers, is_mtp, set_mtp
from ..moe.find import ExpertsInfo, find_experts
from ..wrap_forward import wrap_forward

__all__ = [
    "BESIDE",
    "IN_DECODER",
    "add_mtp_layers",
    "add_stored_mtp_layers",
    "install_forward",
    "mtp_parameters",
    "policy_experts",
    "policy_layer",
]

IN_DECODER = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), "shared_head.norm"),
    **dict.fromkeys(("bailing_hybrid", "hy_v3"), "final_layernorm"),
}
"""Families whose MTP layers follow the decoder's layers, and whose forward stops at ``num_hidden_layers`` -> the name
of the norm after the layer."""

BESIDE = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
"""Families with one MTP layer, of full attention, at ``mtp.layers.0``, with projection and norms in ``mtp``."""

_FULL = ("full_attention", "full")  # of MTP layers, in lists of kinds of attention and of indexers


class _Parts(NamedTuple):
    """The modules around the decoder layer of an MTP layer."""

    embedding_norm: nn.Module
    hidden_norm: nn.Module
    projection: nn.Module  # [2 D] -> [D]
    norm: nn.Module


def add_mtp_layers(model: Any, count: int, dtype: torch.dtype) -> None:
    """Add ``count`` layers to a causal language model of these families, before anything wraps or shards it.

    The layers have the class of the last decoder layer and the dtype of the model.
    """
    with _default_dtype(dtype):
        if model.config.model_type in IN_DECODER:
            _add_in_decoder(model, count)
        else:
            _add_beside(model)


def _add_in_decoder(model: Any, count: int) -> None:
    decoder, config = model.get_decoder(), model.config.get_text_config()
    kind, own = type(decoder.layers[-1]), len(decoder.layers)
    with _one_more_entry(config, own, count):
        for index in range(own, own + count):
            layer, parts = kind(config, index), _new_parts(model)
            layer.enorm, layer.hnorm, layer.eh_proj, norm = parts
            if IN_DECODER[config.model_type] == "final_layernorm":
                layer.final_layernorm = norm
            else:
                layer.shared_head = nn.ModuleDict({"norm": norm})
            decoder.layers.append(layer)
    set_mtp(model, [f"{_decoder_fqn(model)}.layers.{index}" for index in range(own, own + count)])


def _add_beside(model: Any) -> None:
    decoder, config = model.get_decoder(), model.config.get_text_config()
    model.mtp = mtp = nn.Module()
    mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.fc, mtp.norm = _new_parts(model)
    mtp.layers = nn.ModuleList([type(decoder.layers[-1])(config, config.layer_types.index("full_attention"))])
    set_mtp(model, ["mtp"])
    setattr(model, DECODER, _decoder_fqn(model))


def _decoder_fqn(model: Any) -> str:
    return next(name for name, module in model.named_modules() if module is model.get_decoder())


def _new_parts(model: Any) -> _Parts:
    config, kind = model.config.get_text_config(), type(model.get_decoder().norm)

    def norm() -> nn.Module:
        return kind(config.hidden_size, eps=config.rms_norm_eps)

    return _Parts(norm(), norm(), nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False), norm())


def add_stored_mtp_layers(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> None:
    """Add the layers of a run's checkpoint that has tensors of these ``names``."""
    if count := sum(name.endswith((".eh_proj.weight", "mtp.fc.weight")) for name in names):
        add_mtp_layers(model, count, dtype)


def policy_experts(model: nn.Module, plan: Mapping[str, int] | None = None) -> list[ExpertsInfo]:
    """Find the experts modules that the policy's forward runs (``moe/find.py``)."""
    return [info for info in find_experts(model, plan) if not is_mtp(model, info.fqn)]


def mtp_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the policy's forward does not use."""
    return [param for name, param in model.named_parameters() if is_mtp(model, name)]


def policy_layer(model: Any, name: str) -> nn.Module:
    """Return the last of the policy's decoder layers with the kind of attention of the MTP layer ``name``."""
    layers = [model.get_submodule(layer) for layer in decoder_layers(model) if not is_mtp(model, layer)]
    kind = _kind(model.get_submodule(name))
    return next(layer for layer in reversed(layers) if _kind(layer) == kind)


def _kind(layer: nn.Module) -> Any:
    return getattr(layer, "layer_type", getattr(layer, "block_type", None))


def install_forward(model: Any, name: str) -> None:
    """Give the MTP layer ``name`` its forward of ``(hidden, embeddings, *args, **kwargs)``.

    The first two are ``[B, S, D]``, the others the decoder layer's. It returns the input of the head, ``[B, S, D]``.
    """
    layer: Any = model.get_submodule(name)
    if model.config.model_type in IN_DECODER:
        norm = layer.get_submodule(IN_DECODER[model.config.model_type])
        parts = _Parts(layer.enorm, layer.hnorm, layer.eh_proj, norm)
    else:
        mtp = model.mtp
        parts = _Parts(mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.fc, mtp.norm)

    def forward(
        decode: Callable[..., Any], hidden: torch.Tensor, embeddings: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        joined = parts.projection(torch.cat([parts.embedding_norm(embeddings), parts.hidden_norm(hidden)], dim=-1))
        found = decode(joined, *args, **kwargs)
        return parts.norm(found[0] if isinstance(found, tuple) else found)

    wrap_forward(layer, "mtp", forward)


@contextmanager
def _one_more_entry(config: Any, layers: int, count: int) -> Iterator[None]:
    """Lengthen the lists of a config with an entry for each layer: full attention, an indexer, or the last entry."""
    before = {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == layers}
    added = {name: next((kind for kind in _FULL if kind in values), values[-1]) for name, values in before.items()}
    vars(config).update({name: values + [added[name]] * count for name, values in before.items()})
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
