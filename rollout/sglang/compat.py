"""SGLang 0.5.12's private names: layouts of a worker's kernels, and its parallel ranks."""

from typing import Any

from ..layout.layout_check import rank_entry
from ..layout.specs import Rollout

__all__ = ["changed_layout", "rank_of"]

# Flags of ``UnquantizedFusedMoEMethod``: backends that reorder experts' elements, often without a change of shape.
_BACKENDS = {
    "use_flashinfer_cutlass": "flashinfer_cutlass (up projections come first)",
    "use_flashinfer_trtllm_moe": "flashinfer_trtllm (rows are shuffled)",
    "use_triton_kernels": "triton_kernel (inputs are rows)",
    "_aiter_runner": "aiter (rows are shuffled)",
}
_RUNNER = "actor_rollout_ref.rollout.engine_kwargs.sglang.moe_runner_backend"


def changed_layout(model: Any) -> str:
    """Describe the first layer with another layout than slices assume, and a setting to change; empty if none."""
    from sglang.srt.layers.quantization import unquant

    plain = (unquant.UnquantizedEmbeddingMethod, unquant.UnquantizedFusedMoEMethod, unquant.UnquantizedLinearMethod)
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is None:
            continue
        if not isinstance(method, plain):
            return f"{name} is quantised by {type(method).__name__}"
        if getattr(layer, "use_intel_amx_backend", False):
            return f"{name} is packed for AMX"
        for flag, backend in _BACKENDS.items():
            if getattr(method, flag, None):
                return f"{name} runs on {backend}; set {_RUNNER}=triton"
    return ""


def rank_of() -> tuple[int, int, str]:
    """Return this worker's tensor-parallel rank, the tensor-parallel size, and its ``layout_check.rank_entry``."""
    from sglang.srt import distributed

    rank, size = distributed.get_tensor_model_parallel_rank(), distributed.get_tensor_model_parallel_world_size()
    experts_are_whole = distributed.get_moe_expert_parallel_world_size() > 1
    return rank, size, rank_entry(rank, Rollout(size, expert_parallel=experts_are_whole))
