"""Find the layers of a Hugging Face model, and what mixes the tokens of a row in them."""

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

__all__ = ["attention_modules", "decoder_layers", "has_mtp", "is_mtp", "layer_names", "mtp_heads", "mtp_layers"]
__all__ += ["set_mtp", "tower_names"]

_MTP, _MTP_HEADS = "_epfsdp2_mtp", "_epfsdp2_mtp_heads"


def layer_names(model: nn.Module) -> list[str]:
    """Return the FQNs of the model's layers, in order: the innermost modules of a class in ``_no_split_modules``.

    Or of the class that the decoder's hidden states are recorded of: Qwen3-Omni's text model of transformers 5.12 names
    a class in ``_no_split_modules`` that it has none of.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ()) | _recorded_classes(model)
    # fully_shard makes each module an instance of a subclass of its own class.
    named = [fqn for fqn, m in model.named_modules() if classes & {c.__name__ for c in type(m).__mro__}]
    return [fqn for fqn in named if not any(other.startswith(fqn + ".") for other in named)]


def decoder_layers(model: Any) -> list[str]:
    """Return the FQNs of the layers that tokens pass: those of no vision or audio tower, whose config is another."""
    if not isinstance(model, PreTrainedModel):
        return layer_names(model)
    towers = tuple(f"{tower}." for tower in tower_names(model))
    return [layer for layer in layer_names(model) if not layer.startswith(towers)]


def tower_names(model: Any) -> list[str]:
    """Return the FQNs of the vision and audio towers of a transformers model, and of models in them."""
    own = {type(model.config), type(model.config.get_text_config())}
    return [fqn for fqn, m in model.named_modules() if isinstance(m, PreTrainedModel) and type(m.config) not in own]


def set_mtp(model: nn.Module, names: Iterable[str], heads: Iterable[str] = ()) -> None:
    """Mark modules as those of multi-token prediction (``mtp/layers.py``), and ``heads`` in them."""
    setattr(model, _MTP, tuple(f"{name}." for name in names))
    setattr(model, _MTP_HEADS, tuple(heads))


def is_mtp(model: nn.Module, name: str) -> bool:
    """Return whether a module or tensor is for multi-token prediction alone: the policy's forward does not use it."""
    return f"{name}.".startswith(getattr(model, _MTP, ()))


def has_mtp(model: nn.Module) -> bool:
    return hasattr(model, _MTP)


def mtp_heads(model: nn.Module) -> tuple[str, ...]:
    """Return the FQNs of the heads that multi-token prediction layers have of their own."""
    return getattr(model, _MTP_HEADS, ())


def mtp_layers(model: nn.Module) -> list[str]:
    """Return the FQNs of the multi-token prediction layers."""
    return [name for name in layer_names(model) if is_mtp(model, name)]


def _recorded_classes(model: nn.Module) -> set[str]:
    if not isinstance(model, PreTrainedModel):
        return set()
    text = type(model.config.get_text_config())
    decoders = (m for m in model.modules() if isinstance(m, PreTrainedModel) and type(m.config) is text)
    recorded = (getattr(decoder, "_can_record_outputs", None) or {} for decoder in decoders)
    entries = (of.get("hidden_states") for of in recorded)
    return {entry.__name__ for entry in entries if isinstance(entry, type)}


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return by name the modules whose forward takes its attention from transformers' interface."""
    return {fqn: module for fqn, module in model.named_modules() if _calls_the_interface(type(module))}


def _calls_the_interface(kind: type[nn.Module]) -> bool:
    # By what its code names, not by what it is called: transformers looks for the same words in a family's source.
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
