"""vLLM's private names that the weight sync works with, looked up once: where each version has them.

Read in vLLM 0.24.0, 0.27.1, 0.29.0 and 0.32.0. ``tests/rollout/test_vllm_compat.py`` says what happens when one is gone.
"""

import dataclasses
import importlib
from types import ModuleType
from typing import Any

import vllm

from .sockets import WeightSyncError

__all__ = [
    "ATTENTION",
    "LEAVES_NON_PERSISTENT_BUFFERS",
    "SKIP_LOAD_TENSORS",
    "SKIP_TENSORS",
    "cpu_experts_module",
    "finalize_layerwise_reload",
    "get_layer_tensors",
    "get_layerwise_info",
    "initialize_layerwise_reload",
    "make_online_process_loader",
]

_LAYERS = "vllm.model_executor.layers"
_RELOAD = "vllm.model_executor.model_loader.reload"


def find(*places: str) -> Any:
    """The first of several ``module:name`` that this vLLM has.

    Raises:
        WeightSyncError: it has none of them.
    """
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise WeightSyncError(
        f"vLLM {getattr(vllm, '__version__', '(unknown version)')} has no {' or '.join(places)}, which the layer-wise "
        "weight sync needs; vLLM 0.24 to 0.32 have it. With this vLLM, verl's own loader still works, where kernels "
        "keep the checkpoint's layout: actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
        "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
    )


get_layerwise_info = find(f"{_RELOAD}.layerwise:get_layerwise_info")
make_online_process_loader = find(f"{_RELOAD}.layerwise:make_online_process_loader")
initialize_layerwise_reload = find(f"{_RELOAD}:initialize_layerwise_reload")
finalize_layerwise_reload = find(f"{_RELOAD}:finalize_layerwise_reload")
get_layer_tensors = find(f"{_RELOAD}.utils:get_layer_tensors")

# What never goes to meta, and of that what no loader fills either. Up to 0.26 both were one set (a bias went to meta
# and was waited for like a weight), so the one set is what each name means there.
SKIP_TENSORS = find(f"{_RELOAD}.meta:SKIP_TENSORS")
SKIP_LOAD_TENSORS = find(f"{_RELOAD}.meta:SKIP_LOAD_TENSORS", f"{_RELOAD}.meta:SKIP_TENSORS")

# Before 0.27 a reload copies fresh, uninitialised values over buffers that are in no checkpoint, too.
LEAVES_NON_PERSISTENT_BUFFERS = "kernel_non_persistent_buffers" in {
    field.name for field in dataclasses.fields(find(f"{_RELOAD}.types:LayerReloadingInfo"))
}


# Layers whose own parameters are scales, which a checkpoint of trained weights has not.
ATTENTION = (find(f"{_LAYERS}.attention:Attention"), find(f"{_LAYERS}.attention:MLAAttention"))


def cpu_experts_module() -> ModuleType | None:
    """Where experts are chosen and computed on a CPU (``select_experts``); None if there is no such module."""
    for place in ("cpu_fused_moe", "experts.cpu_moe"):
        try:
            return importlib.import_module(f"{_LAYERS}.fused_moe.{place}")
        except ImportError:
            continue
    return None
