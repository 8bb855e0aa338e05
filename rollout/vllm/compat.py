"""vLLM's private names that the weight sync works with, looked up once.

Read in vLLM 0.24.0, 0.27.1, 0.29.0 and 0.32.0. One that is gone has no slower way unless it is said here.
"""

import dataclasses
import importlib
from functools import partial
from types import ModuleType

from ...engine.compat.private_names import look_up

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

_find = partial(
    look_up,
    known="0.24 to 0.32",
    instead="verl's own loader, which takes whole tensors and is right where kernels keep a checkpoint's layout: "
    "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
    "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
)

get_layerwise_info = _find(f"{_RELOAD}.layerwise:get_layerwise_info")
make_online_process_loader = _find(f"{_RELOAD}.layerwise:make_online_process_loader")
initialize_layerwise_reload = _find(f"{_RELOAD}:initialize_layerwise_reload")
finalize_layerwise_reload = _find(f"{_RELOAD}:finalize_layerwise_reload")
get_layer_tensors = _find(f"{_RELOAD}.utils:get_layer_tensors")

# What never goes to meta, and of that what no loader fills either. Up to 0.26 both were one set (a bias went to meta
# and was waited for like a weight), so the one set is what each name means there.
SKIP_TENSORS = _find(f"{_RELOAD}.meta:SKIP_TENSORS")
SKIP_LOAD_TENSORS = _find(f"{_RELOAD}.meta:SKIP_LOAD_TENSORS", f"{_RELOAD}.meta:SKIP_TENSORS")

# Before 0.27 a reload copies fresh, uninitialised values over buffers that are in no checkpoint, too.
LEAVES_NON_PERSISTENT_BUFFERS = "kernel_non_persistent_buffers" in {
    field.name for field in dataclasses.fields(_find(f"{_RELOAD}.types:LayerReloadingInfo"))
}


# Layers whose own parameters are scales, which a checkpoint of trained weights has not.
ATTENTION = (_find(f"{_LAYERS}.attention:Attention"), _find(f"{_LAYERS}.attention:MLAAttention"))


def cpu_experts_module() -> ModuleType | None:
    """Where experts are chosen and computed on a CPU (``select_experts``); None if there is no such module."""
    for place in ("cpu_fused_moe", "experts.cpu_moe"):
        try:
            return importlib.import_module(f"{_LAYERS}.fused_moe.{place}")
        except ImportError:
            continue
    return None
