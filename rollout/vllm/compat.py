"""vLLM's private names that the weight sync uses, looked up once.

They exist in vLLM 0.24.0, 0.27.1, 0.29.0, 0.32.0 and 0.33.0. A missing name raises an error unless a fallback stands
here.
"""

from functools import partial

from ...engine.compat.private_names import look_up

__all__ = ["ATTENTION", "SKIP_LOAD_TENSORS", "SKIP_TENSORS", "finalize_layerwise_reload"]
__all__ += ["get_layer_tensors", "get_layerwise_info", "initialize_layerwise_reload", "materialize_layer"]
__all__ += ["process_layer"]

_LAYERS = "vllm.model_executor.layers"
_RELOAD = "vllm.model_executor.model_loader.reload"

_find = partial(
    look_up,
    known="0.24 to 0.33",
    instead="verl's own loader, which loads full tensors and is correct where kernels keep a checkpoint's layout: "
    "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
    "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
)

get_layerwise_info = _find(f"{_RELOAD}.layerwise:get_layerwise_info")
process_layer = _find(f"{_RELOAD}.layerwise:_layerwise_process")
materialize_layer = _find(f"{_RELOAD}.meta:materialize_layer")
initialize_layerwise_reload = _find(f"{_RELOAD}:initialize_layerwise_reload")
finalize_layerwise_reload = _find(f"{_RELOAD}:finalize_layerwise_reload")
get_layer_tensors = _find(f"{_RELOAD}.utils:get_layer_tensors")

# Tensors that a reload never puts on meta, and the subset that no loader fills. vLLM up to 0.26 has one set for both,
# because there a bias goes to meta and counts like a weight.
SKIP_TENSORS = _find(f"{_RELOAD}.meta:SKIP_TENSORS")
SKIP_LOAD_TENSORS = _find(f"{_RELOAD}.meta:SKIP_LOAD_TENSORS", f"{_RELOAD}.meta:SKIP_TENSORS")

# Layers whose own parameters are quantization scales, which checkpoints of trained weights lack.
ATTENTION = (_find(f"{_LAYERS}.attention:Attention"), _find(f"{_LAYERS}.attention:MLAAttention"))
