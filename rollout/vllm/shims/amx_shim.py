"""Shim that lets vLLM's CPU build run float32 experts on a CPU that has AMX, by its vector kernel.

vLLM 0.27 and 0.28 refuse every MoE there that is not bfloat16. Earlier versions use a loop over experts, which fails
because it makes an activation module during a forward, where vLLM has no config (``fused_moe/cpu_fused_moe.py``,
``check_grouped_gemm``). ``test_vllm_shims.py`` fails once vLLM no longer needs the shim.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform

from ..compat import cpu_experts_module
from . import wrap

__all__ = ["install"]


def install() -> None:
    """Wrap the check, once per process; no-op on other platforms and on versions without the check."""
    module = cpu_experts_module()
    kernel: Any = getattr(module, "CPUFusedMOE", None)
    if current_platform.is_cpu() and hasattr(kernel, "check_grouped_gemm"):
        wrap(kernel, "check_grouped_gemm", _checking)
        _use_plain_silu(module)


def _checking(refusing: Callable[[Any, Any], tuple[bool, str]]) -> Callable[[Any, Any], tuple[bool, str]]:
    def check_grouped_gemm(self, layer):
        is_bfloat16 = layer.w13_weight.dtype == torch.bfloat16
        try:
            answer = refusing(self, layer)
        except RuntimeError:
            if is_bfloat16:
                raise
            answer = (False, "none")
        if answer[0] or is_bfloat16 or not hasattr(torch.ops._C, "prepack_moe_weight"):
            return answer
        aligned = layer.w13_weight.size(1) % 32 == 0 and layer.w2_weight.size(1) % 32 == 0
        return (True, "vec") if aligned and torch.cpu._is_amx_tile_supported() else answer

    return check_grouped_gemm


def _use_plain_silu(module: Any) -> None:
    """Make the loop over experts, used for sizes that no kernel supports, call SiLU without making a module."""
    from vllm.model_executor.layers.activation import SiluAndMul

    activations = getattr(module, "_CPU_MOE_ACT_FN", {})
    for kind in activations:
        if kind.name == "SILU":
            activations[kind] = SiluAndMul.forward_native
