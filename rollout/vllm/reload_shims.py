"""Shims for defects of vLLM's layer-wise reload, its loaders and a head; each is a no-op where its cause is absent."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.platforms import current_platform

from ...engine.compat.wrap_function import wrap
from .compat import get_layerwise_info

__all__ = ["end_loading", "finish_model", "install", "prepare_layer", "prepare_model", "remove_unused"]

# Models whose loader copies into these parameters directly instead of calling their weight loaders. vLLM 0.33 loads
# sinks by a loader of their own, which cuts them for the worker.
_DIRECT_COPIES = {
    **dict.fromkeys(("DeepSeekV4MTP", "DeepseekV4Model"), ("attn_sink",)),
    "GptOssModel": ("w13_weight", "w13_bias", "w2_weight", "w2_bias", "sinks"),
    "HYV4Model": ("learnable_sink_param",),
    "InklingMoE": ("w13_weight", "w2_weight"),
    "MiMoV2Model": ("attention_sink_bias",),
}
_BIAS = "e_score_correction_bias"
_NESTED = "routed_experts"
_DERIVE = "process_weights_after_loading"

_Weights = Iterable[tuple[str, torch.Tensor]]


def install() -> None:
    """Let vLLM load and use tensors that its classes lose or do not find; once per process."""
    for module, owner, name, make, unless in (
        ("layers.fused_moe.routed_experts", "RoutedExperts", "load_weights", _loading_by_parameters, ""),
        ("models.dbrx", "DbrxModel", "load_weights", _finding_experts, _NESTED),
        ("models.phimoe", "PhiMoEForCausalLM", "compute_logits", _adding_bias, "bias"),
    ):
        try:
            found = getattr(importlib.import_module(f"vllm.model_executor.{module}"), owner)
        except (ImportError, AttributeError):
            continue
        wrap(found, name, make, unless)


def _adding_bias(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Let vLLM add the bias of Phi-3.5-MoE's head, which loads it and never adds it."""

    def compute_logits(self: Any, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)

    return compute_logits


def _finding_experts(load: Callable[..., Iterable[str]]) -> Callable[..., Iterable[str]]:
    """Let vLLM load DBRX: 0.27 looks its experts' parameters up under names that it lacks (``KeyError``)."""

    def load_weights(self: torch.nn.Module, weights: _Weights) -> Iterable[str]:
        if any(f".{_NESTED}." in name for name, _ in self.named_parameters()):
            weights = ((name.replace(".experts.mlp.", f".experts.{_NESTED}.mlp."), values) for name, values in weights)
        return load(self, weights)

    return load_weights


def _loading_by_parameters(load: Callable[..., Iterable[str]]) -> Callable[..., Iterable[str]]:
    """Load experts by their parameters' loaders, and the correction bias that Laguna's checkpoints have among them.

    A reload counts calls of the parameters' loaders, but vLLM 0.24 calls the module's. The reload then loses experts of
    models that run by transformers' code. vLLM 0.27 silently drops the bias and routes with zeros.
    """
    calls_the_modules = "self.weight_loader(" in inspect.getsource(load)

    def load_weights(self: Any, weights: _Weights) -> Iterable[str]:
        biases: list[str] = []

        def others() -> _Weights:
            for name, values in weights:
                if name != _BIAS or (own := self._parameters.get(_BIAS)) is None:
                    yield name, values
                    continue
                getattr(own, "weight_loader", _copy_values)(own, values)
                biases.append(name)

        if calls_the_modules:
            self.weight_loader = lambda *, param, **arguments: param.weight_loader(param=param, **arguments)
        try:
            yield from load(self, others())
        finally:
            if calls_the_modules:
                del self.weight_loader
        yield from biases

    return load_weights


def prepare_layer(layer: Any) -> Any:
    """Prepare a layer for a reload; return the kernel that was removed, which the caller restores if none is built."""
    method = getattr(layer, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None) if current_platform.is_cpu() else None
    if method is not None and kernel is not None:
        # With a kernel present, vLLM 0.28 to 0.33 treats the reload as an in-place update and skips the CPU packing.
        method.moe_kernel = None
    recorded = get_layerwise_info(layer).restore_metadata
    for tensor in [*layer._parameters.values(), *recorded[0].values(), *recorded[1].values()]:
        loader = getattr(tensor, "weight_loader", None)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            setattr(loader, "__name__", "partial_weight_loader")  # noqa: B010 - vLLM recognizes wrapped loaders by name
    return kernel


def prepare_model(model: torch.nn.Module) -> None:
    """Let a reload count direct copies into parameters; they go to the meta device, which loses the values.

    DeepSeek-V4's class for NVIDIA GPUs also derives tensors whenever it has loaded some. It waits for ``end_loading``.
    """
    remove_unused(model)
    for part in model.modules():
        if getattr(part, "finalizes_weights_during_load", False) and hasattr(part, _DERIVE):
            setattr(part, _DERIVE, lambda: None)
        names = _DIRECT_COPIES.get(type(part).__name__, ())
        for layer in part.modules() if names else ():
            info = get_layerwise_info(layer)
            for name in names:
                own: Any = info.restore_metadata[0].get(name)
                if type(own) is torch.nn.Parameter and not ("sink" in name and hasattr(own, "weight_loader")):
                    own.__class__ = _DirectlyCopiedParameter
                    vars(own).update(weight_loader=_copy_values, loads_on=info.restore_device)


def remove_unused(model: torch.nn.Module) -> None:
    """Remove the norms that vLLM's A.X-K1 has in dense layers and never calls: the trainer's model has none."""
    for part in model.modules():
        if type(part).__name__ == "AXK1DecoderLayer" and not part.is_layer_sparse:
            part.post_mlp_layernorm = torch.nn.Identity()


def end_loading(model: torch.nn.Module) -> None:
    """Derive the tensors that waited since ``prepare_model``: the model's parameters have their values again."""
    for part in model.modules():
        if _DERIVE in vars(part):
            delattr(part, _DERIVE)
            getattr(part, _DERIVE)()


def finish_model(model: torch.nn.Module) -> None:
    """Renew in place the tensors that vLLM derives once from the first weights; CUDA graphs keep their addresses.

    These are FlashInfer's float32 attention sinks, which vLLM 0.27.1 renews itself, and weights of a convolution that
    the CPU build keeps beside packed ones (``MambaMixer2``).
    """
    for part in model.modules():
        unpacked = getattr(getattr(part, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        kept = part._buffers.get("conv_weights")
        if unpacked is not None and kept is not None:
            kept.copy_(unpacked)
        own = getattr(part, "sinks", None)
        kept = getattr(getattr(getattr(part, "attn", None), "impl", None), "sinks", None)
        if own is not None and kept is not None and kept is not own:
            kept.copy_(own)


class _DirectlyCopiedParameter(torch.nn.Parameter):
    """A parameter that passes ``copy_`` into it, its ``data`` or a part to its weight loader while it is on meta."""

    loads_on: torch.device

    @property
    def device(self):  # type: ignore[override]  # loaders move values there before they copy them
        return self.loads_on if self.is_meta else super().device

    @property
    def data(self):
        return self if self.is_meta else super().data

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]

    def copy_(self, values: torch.Tensor, non_blocking: bool = False):
        if not self.is_meta:
            return super().copy_(values, non_blocking)
        self.weight_loader(self, values)  # type: ignore[attr-defined]
        return self

    def __getitem__(self, index: Any) -> Any:
        if not self.is_meta:
            return super().__getitem__(index)
        return _Part(self, index if isinstance(index, tuple) else (index,))


class _Part:
    """A part of a parameter on meta."""

    def __init__(self, whole: _DirectlyCopiedParameter, index: tuple[Any, ...]):
        self._whole, self._index = whole, index

    def copy_(self, values: torch.Tensor) -> None:
        if self._whole.dim() == 1:  # DeepSeek-V4's first sinks; the others, of heads that pad, are -inf
            missing = len(self._whole) - len(values)
            self._whole.copy_(torch.nn.functional.pad(values, (0, missing), value=-torch.inf))
        else:
            self._whole.weight_loader(self._whole, values, *self._index)  # type: ignore[attr-defined]


def _copy_values(param: torch.Tensor, values: torch.Tensor, *index: Any) -> None:
    # Without a default for the index, because vLLM repeats calls for sinks by a loader that takes two arguments.
    torch.Tensor.copy_(torch.Tensor.__getitem__(param.data, index), values)
