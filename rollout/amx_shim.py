"""Shim: vLLM 0.27 and 0.28 refuse every MoE that is not bfloat16 on a CPU that has AMX.

Their vector kernel takes float32 on the same CPU and is what a CPU without AMX uses (``fused_moe/cpu_fused_moe.py``,
``check_grouped_gemm``), so a refusal for that reason falls through to it. ``tests/rollout/test_vllm_remedies.py`` fails
on the day that vLLM no longer refuses.
"""

import functools
from typing import Any

import torch
from vllm.platforms import current_platform

from .vllm_compat import cpu_experts_module

__all__ = ["install"]


def install() -> None:
    """Wrap the check, once per process; does nothing off the CPU platform or where vLLM has no such check."""
    if not current_platform.is_cpu():
        return
    kernel: Any = getattr(cpu_experts_module(), "CPUFusedMOE", None)
    refusing = getattr(kernel, "check_grouped_gemm", None)
    if refusing is None or hasattr(refusing, "__wrapped__"):
        return

    @functools.wraps(refusing)
    def check_grouped_gemm(self, layer):
        try:
            return refusing(self, layer)
        except RuntimeError:
            if layer.w13_weight.dtype == torch.bfloat16:
                raise
            aligned = layer.w13_weight.size(1) % 32 == 0 and layer.w2_weight.size(1) % 32 == 0
            return (True, "vec") if aligned else (False, "none")

    kernel.check_grouped_gemm = check_grouped_gemm
