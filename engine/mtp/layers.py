"""Build the multi-token prediction (MTP) layers of a checkpoint, which transformers' model classes leave out.

A layer is one more decoder layer (https://arxiv.org/abs/2412.19437, section 2.2). From the hidden states ``h_t`` of the
final norm and the embedding of the next token, it drafts the token after that one:

    h'_t = project([norm(embedding_t+1), norm(h_t)])        draft_t = head(norm(decoder_layer(h'_t)))

It has the place and the names that it has in checkpoints: ``model.layers.N`` after the decoder's layers, or ``mtp``
beside the decoder. So it is an FSDP unit with experts of its own, and is loaded, saved and exported like any layer.
Nemotron-H's blocks have attention or experts alone, so its layer is two of them. DeepSeek-V4's hidden states are
streams ``[B, S, hc_mult, D]``, which its layer reads as the last decoder layer returns them. Inkling's layers have no
experts and no last norm, and read hidden states first, as in vLLM's ``models/inkling/nvidia/mtp.py``. Embeddings have
the model's own norm there, which transformers 5.24 leaves out. Step-3.7's layers read hidden states before the last
norm, and each has a head of its own, as in vLLM's ``models/step3p5_mtp.py``.
Other embeddings and heads are the model's; the copies of them that checkpoints have are not read.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ..compat.transformers_names import DECODER, NESTED, NUMBERED
from ..model.layers import decoder_layers, is_mtp, mtp_layers, set_mtp, tower_names
from ..moe.find import ExpertsInfo, find_experts
from ..wrap_forward import wrap_forward

__all__ = [
    "MTP_LAYOUTS",
    "MtpLayout",
    "add_mtp_layers",
    "add_stored_mtp_layers",
    "draft_layers",
    "install_forward",
    "layout_of",
    "logits_divisor",
    "mtp_parameters",
    "policy_experts",
    "policy_layer",
]


@dataclass(frozen=True)
class MtpLayout:
    """Where a family's MTP layers are, and the names of what is in them besides decoder layers.

    Args:
        place: ``decoder``, after the decoder's layers, where the model's own forward stops; ``beside``, one layer
            ``mtp`` of the decoder layers ``mtp.layers.0`` and up; ``base``, as ``mtp.layers.N`` of the base model.
        embedding_norm, hidden_norm, projection: in the layer, of its inputs.
        last_norm: in the layer, after its decoder layers; empty if there is none.
        head: in the layer, of a head of its own; empty if drafts have the model's.
        masks_first: whether vLLM's drafter gets no embedding at a sequence's first token.
        reads_raw: whether the first layer reads the model's hidden states before the last norm. Each further one then
            reads those of the layer before, also before their norm.
    """

    place: Literal["decoder", "beside", "base"]
    embedding_norm: str
    hidden_norm: str
    projection: str
    last_norm: str = ""
    head: str = ""
    masks_first: bool = False
    reads_raw: bool = False


_DEEPSEEK = MtpLayout("decoder", "enorm", "hnorm", "eh_proj", "shared_head.norm", masks_first=True)
_QWEN = MtpLayout("beside", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_INKLING = MtpLayout("base", "embed_norm", "hidden_norm", "input_proj")
_IN_FIRST = replace(_QWEN, embedding_norm="layers.0.enorm", hidden_norm="layers.0.hnorm")

MTP_LAYOUTS = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _DEEPSEEK),
    **dict.fromkeys(("bailing_hybrid", "hy_v3"), replace(_DEEPSEEK, last_norm="final_layernorm")),
    "step3p7": MtpLayout(
        *("decoder", "enorm", "hnorm", "eh_proj", "transformer.shared_head.norm", "transformer.shared_head.output"),
        reads_raw=True,
    ),
    **dict.fromkeys(("mellum", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"), _QWEN),
    "deepseek_v4": replace(_IN_FIRST, projection="layers.0.e_proj", last_norm="layers.0.norm", masks_first=True),
    "nemotron_h": replace(_IN_FIRST, projection="layers.0.eh_proj", last_norm="layers.1.final_layernorm"),
    **dict.fromkeys(("inkling_mm_model", "inkling_text"), _INKLING),
}
"""The layout of each family, by ``model_type``."""

_FULL = ("full_attention", "full")  # of MTP layers, in lists of kinds of attention and of indexers
_KINDS = ("layer_types", "layers_block_type")
_PROJECTION = re.compile(r"(\.eh_proj|\.e_proj|\bmtp\.fc|\bmtp\.layers\.\d+\.input_proj)\.weight$")


def add_mtp_layers(model: Any, count: int, dtype: torch.dtype) -> None:
    """Add ``count`` layers to a causal language model of these families, before anything wraps or shards it.

    The layers have the class of the last decoder layer and the dtype of the model.
    """
    place = layout_of(model).place
    with _default_dtype(dtype):
        if place == "decoder":
            _add_in_decoder(model, count)
        elif place == "base":
            _add_in_base(model, count)
        else:
            _add_beside(model)


def layout_of(model: Any) -> MtpLayout:
    return MTP_LAYOUTS[model.config.model_type]


def _add_in_decoder(model: Any, count: int) -> None:
    decoder, config = model.get_decoder(), model.config.get_text_config()
    kind, own, kinds = type(decoder.layers[-1]), len(decoder.layers), {}
    if getattr(config, "mtp_mlp_layer_types", None):  # Step-3.7's, whose limits are of the decoder's layers alone
        kinds = {"layer_types": config.mtp_layer_types, "mlp_layer_types": config.mtp_mlp_layer_types}
        kinds |= dict.fromkeys(("swiglu_limits", "swiglu_limits_shared"), [None] * count)
    with _more_entries(config, own, count, kinds):
        for index in range(own, own + count):
            layer = kind(config, index)
            decoder.layers.append(layer)
            _add_parts(model, layer)
    names = [f"{_decoder_fqn(model)}.layers.{index}" for index in range(own, own + count)]
    head = layout_of(model).head
    set_mtp(model, names, heads=[f"{name}.{head}" for name in names if head])


def _add_in_base(model: Any, count: int) -> None:
    decoder, config = model.get_decoder(), model.config.get_text_config()
    kind, own, local = type(decoder.layers[-1]), len(decoder.layers), config.mtp_local_layer_ids or ()
    kinds = {
        "layer_types": ["hybrid_sliding" if index in local else "hybrid" for index in range(count)],
        "mlp_layer_types": ["dense"] * count,
    }
    model.base_model.mtp = nn.Module()
    with _more_entries(config, own, count, kinds):
        model.base_model.mtp.layers = nn.ModuleList([kind(config, own + index) for index in range(count)])
    for layer in model.base_model.mtp.layers:
        _add_parts(model, layer)
    setattr(model, NESTED, True)
    set_mtp(model, [f"{model.base_model_prefix}.mtp"])


def _add_beside(model: Any) -> None:
    decoder, config = model.get_decoder(), model.config.get_text_config()
    lists = (getattr(config, name, None) for name in ("mtp_layers_block_type", "mtp_layer_types"))
    kinds = next(filter(None, lists), ["sliding_attention" if hasattr(decoder, "hc_head") else "full_attention"])
    kind, own = type(decoder.layers[-1]), len(decoder.layers)
    model.mtp = nn.Module()
    with _more_entries(config, own, len(kinds), dict.fromkeys(_KINDS, kinds)):
        model.mtp.layers = nn.ModuleList([kind(config, own + index) for index in range(len(kinds))])
    _add_parts(model, model.mtp)
    if hasattr(decoder, "hc_head"):
        setattr(model, NUMBERED, True)
    set_mtp(model, ["mtp"])
    setattr(model, DECODER, _decoder_fqn(model))


def _decoder_fqn(model: Any) -> str:
    return next(name for name, module in model.named_modules() if module is model.get_decoder())


def _add_parts(model: Any, layer: nn.Module) -> None:
    config, decoder, layout = model.config.get_text_config(), model.get_decoder(), layout_of(model)
    kind = type(decoder.norm if hasattr(decoder, "norm") else decoder.norm_f)
    eps = config.rms_norm_eps if hasattr(config, "rms_norm_eps") else config.layer_norm_epsilon
    for name in filter(None, (layout.embedding_norm, layout.hidden_norm, layout.last_norm)):
        _put(layer, name, kind(config.hidden_size, eps=eps))
    has_streams, width = hasattr(decoder, "hc_head"), config.hidden_size
    _put(layer, layout.projection, nn.Linear(width if has_streams else 2 * width, width, bias=False))
    if layout.head:
        _put(layer, layout.head, nn.Linear(width, config.vocab_size, bias=False))
    if has_streams:
        _put(layer, "layers.0.h_proj", nn.Linear(width, width, bias=False))
        _put(layer, "layers.0.hc_head", type(decoder.hc_head)(config))


def _put(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Add a module under a name with dots, and the modules between."""
    *between, own = name.split(".")
    for part in between:
        if not hasattr(parent, part):
            parent.add_module(part, nn.Module())
        parent = getattr(parent, part)
    parent.add_module(own, module)


def add_stored_mtp_layers(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> None:
    """Add the layers of a run's checkpoint that has tensors of these ``names``."""
    if count := sum(bool(_PROJECTION.search(name)) for name in names):
        add_mtp_layers(model, count, dtype)


def policy_experts(model: nn.Module, plan: Mapping[str, int] | None = None) -> list[ExpertsInfo]:
    """Find the experts modules that the policy's decoder runs (``moe/find.py``)."""
    others = tuple(f"{tower}." for tower in tower_names(model))
    return [info for info in find_experts(model, plan) if not (is_mtp(model, info.fqn) or info.fqn.startswith(others))]


def mtp_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the policy's forward does not use."""
    return [param for name, param in model.named_parameters() if is_mtp(model, name)]


def policy_layer(model: Any, name: str) -> nn.Module:
    """Return the last of the policy's decoder layers with the kind of attention of the MTP layer ``name``."""
    layers = [model.get_submodule(layer) for layer in decoder_layers(model) if not is_mtp(model, layer)]
    kind = _kind(model.get_submodule(name))
    return next(layer for layer in reversed(layers) if _kind(layer) == kind)


def _kind(layer: nn.Module) -> Any:
    kind = getattr(layer, "layer_type", getattr(layer, "block_type", None))
    return kind, getattr(getattr(layer, "self_attn", None), "sliding_window", None)


def logits_divisor(model: Any) -> float:
    """Return what the hidden states are divided by before the head."""
    return getattr(model.config.get_text_config(), "logits_mup_width_multiplier", 1.0)


def draft_layers(model: Any) -> list[list[str]]:
    """Return the FQNs of the decoder layers of each MTP layer: one, or Nemotron-H's blocks."""
    names = mtp_layers(model)
    return [names] if layout_of(model).place == "beside" else [[name] for name in names]


def install_forward(model: Any, names: Sequence[str]) -> None:
    """Give the decoder layers ``names`` of an MTP layer their forward of ``(hidden, embeddings, *args, **kwargs)``.

    The first one gets the model's hidden states or streams, or those of the MTP layer before, and embeddings
    ``[B, S, D]``. Each further one gets the output of the one before. The last one returns the hidden states of the
    next MTP layer, and the input of the head, both ``[B, S, D]``. The other arguments are a decoder layer's.
    """
    layout = layout_of(model)
    parts = model.mtp if layout.place == "beside" else model.get_submodule(names[0])
    of_embeddings, of_hidden, projection = map(
        parts.get_submodule, (layout.embedding_norm, layout.hidden_norm, layout.projection)
    )
    last_norm = parts.get_submodule(layout.last_norm) if layout.last_norm else nn.Identity()
    reads_hidden_first = layout.place == "base"
    streams: Any = model.get_submodule(names[0]) if hasattr(model.get_decoder(), "hc_head") else None

    def forward(
        name: str, decode: Callable[..., Any], hidden: torch.Tensor, embeddings: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if name == names[0] and streams is None:
            both = [of_embeddings(embeddings), of_hidden(hidden)]
            hidden = projection(torch.cat(both[::-1] if reads_hidden_first else both, dim=-1))
        elif name == names[0]:
            hidden = projection(of_embeddings(embeddings))[:, :, None] + streams.h_proj(of_hidden(hidden))
        found = decode(hidden, *args, **kwargs)
        hidden = found[0] if isinstance(found, tuple) else found
        if streams is not None:
            hidden = streams.hc_head(hidden)
        if name != names[-1]:
            return hidden
        draft = last_norm(hidden)
        return hidden if layout.reads_raw else draft, draft

    for name in names:
        wrap_forward(model.get_submodule(name), "mtp", partial(forward, name))


@contextmanager
def _more_entries(config: Any, layers: int, count: int, kinds: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Lengthen the lists of a config by ``count``: by ``kinds``, full attention, an indexer, or the last entry."""
    before = dict(vars(config))
    lists = {k: v for k, v in before.items() if isinstance(v, list) and len(v) == layers}
    added = {k: [next((kind for kind in _FULL if kind in v), v[-1])] * count for k, v in lists.items()}
    added |= {name: list(kinds[name]) for name in lists.keys() & kinds.keys()}
    vars(config).update({name: values + added[name] for name, values in lists.items()})
    if heads := getattr(config, "num_sliding_attention_heads", None):  # Step-3.7's config gives them to its own layers
        sliding = [i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention"]
        config.num_hidden_layers = layers + count
        config.per_layer_config = {i: {"num_attention_heads": heads} for i in sliding}
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
