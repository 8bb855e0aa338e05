"""Low-rank adapters in a vLLM worker: its layers without their adapters for a reload, and the adapters of a sync."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from verl.utils.vllm import TensorLoRARequest
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from vllm.lora.layers import BaseLayerWithLoRA

from ...engine.errors import listed
from ..transport.watched_sockets import WeightSyncError

__all__ = ["load_adapters", "without_adapters"]


@contextlib.contextmanager
def without_adapters(*models: torch.nn.Module) -> Iterator[None]:
    """Put every layer in the place of its wrapper with adapters.

    The wrappers rename parameters (``<layer>.base_layer.weight``) and hide layers from their models' loaders.
    """
    parents = [parent._modules for model in models for parent in model.modules()]
    children: list[tuple[Any, ...]] = [(modules, *child) for modules in parents for child in modules.items()]
    wrapped = [child for child in children if isinstance(child[2], BaseLayerWithLoRA)]
    experts: list[Any] = [part for *_, layer in wrapped for part in layer.modules()]
    prefixes = [(part, part.lora_base_layer_prefix) for part in experts if hasattr(part, "lora_base_layer_prefix")]
    for modules, name, layer in wrapped:
        modules[name] = layer.base_layer
    for part, _ in prefixes:
        part.lora_base_layer_prefix = ""
    try:
        yield
    finally:
        for modules, name, layer in wrapped:
            modules[name] = layer
        for part, prefix in prefixes:
            part.lora_base_layer_prefix = prefix


def load_adapters(worker: Any, config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the adapters that a worker computes with, and keep ``tensors`` (``engine/lora/rollout_names.py``).

    Raises ``WeightSyncError`` if the model has no layer for some of them, which vLLM drops silently.
    """
    worker.remove_lora(VLLM_LORA_INT_ID)
    own = {"peft_config": config, "lora_tensors": tensors}
    worker.add_lora(TensorLoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, VLLM_LORA_PATH, **own))
    manager = worker.model_runner.model.lora_manager
    held = manager.get_adapter(VLLM_LORA_INT_ID).loras
    if unknown := sorted(name for name in held if name.removesuffix(".base_layer") not in manager.modules):
        raise WeightSyncError(
            f"{len(unknown)} adapters were sent that vLLM's model has no layers for: {listed(unknown)}. "
            "actor_rollout_ref.rollout.engine_kwargs.vllm.lora_target_modules leaves them out, or vLLM does not adapt "
            "such layers; actor_rollout_ref.model.lora.merge=True works for every layer."
        )
