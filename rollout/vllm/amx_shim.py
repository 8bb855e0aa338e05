"""Shim: vLLM's CPU build and experts in float32 on a CPU that has AMX.

0.27 and 0.28 refuse every MoE there that is not bfloat16. Versions before send it to a loop over experts, which then
fails: it makes an activation module in the middle of a forward, where vLLM has no config. Their vector kernel takes
float32 on the same CPU and is what a CPU without AMX uses (``fused_moe/cpu_fused_moe.py``, ``check_grouped_gemm``), so
that is taken. ``tests/rollout/test_vllm_remedies.py`` fails on the day that vLLM does it itself.
"""

import functools
from typing import Any

import torch
from vllm.platforms import current_platform

from .compat import cpu_experts_module

__all__ = ["install"]


def install() -> None:
    """Wrap the check, once per process; does nothing off the CPU platform or where vLLM has no such check."""
    if not current_platform.is_cpu():
        return
    module = cpu_experts_module()
    kernel: Any = getattr(module, "CPUFusedMOE", None)
    refusing = getattr(kernel, "check_grouped_gemm", None)
    if refusing is None or hasattr(refusing, "__wrapped__"):
        return

    @functools.wraps(refusing)
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

    kernel.check_grouped_gemm = check_grouped_gemm
    _use_plain_silu(module)


def _use_plain_silu(module: Any) -> None:
    """Have the loop over experts, for sizes that no kernel takes, call the function and make no module."""
    from vllm.model_executor.layers.activation import SiluAndMul

    activations = getattr(module, "_CPU_MOE_ACT_FN", {})
    for kind in activations:
        if kind.name == "SILU":
            activations[kind] = SiluAndMul.forward_native
