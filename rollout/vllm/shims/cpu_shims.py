"""Shims for the experts of vLLM's CPU build; no-ops on other platforms and on versions without the functions.

``test_vllm_shims.py`` fails once vLLM no longer needs one of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform

from ..compat import cpu_experts_module
from . import wrap

__all__ = ["install"]


def install() -> None:
    """Let float32 experts run on a CPU that has AMX, and return the experts that tokens are routed to."""
    from vllm.v1.worker import gpu_model_runner

    module: Any = cpu_experts_module()
    if not current_platform.is_cpu() or module is None:
        return
    if hasattr(kernel := getattr(module, "CPUFusedMOE", None), "check_grouped_gemm"):
        wrap(kernel, "check_grouped_gemm", _checking)
        _use_plain_silu(module)
    binding = functools.partial(_binding, module)
    wrap(gpu_model_runner.GPUModelRunner, "_bind_routed_experts_capturer", binding)  # up to 0.28
    wrap(gpu_model_runner, "bind_routed_experts_capturer", binding)


def _checking(refusing: Callable[[Any, Any], tuple[bool, str]]) -> Callable[[Any, Any], tuple[bool, str]]:
    """Choose the vector kernel for float32: vLLM 0.27 and 0.28 refuse every MoE there that is not bfloat16.

    Earlier versions use a loop over experts, which fails because it makes an activation module during a forward, where
    vLLM has no config (``fused_moe/cpu_fused_moe.py``).
    """

    def check_grouped_gemm(self, layer):
        if layer.w13_weight.dtype == torch.bfloat16:
            return refusing(self, layer)
        try:
            answer = refusing(self, layer)
        except RuntimeError:
            answer = (False, "none")
        if answer[0] or not hasattr(torch.ops._C, "prepack_moe_weight"):
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


def _binding(experts: Any, bind: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Bind the capturer as vLLM does, and to the layers whose kernel computes the routing itself.

    Versions from 0.27 on refuse these ("monolithic MoE kernel"); earlier ones report expert 0 for all tokens.
    """

    def bind_routed_experts_capturer(model, capturer):
        try:
            bind(model, capturer)
        except ValueError as error:
            if "monolithic" not in str(error):
                raise
        for module in (model if isinstance(model, torch.nn.Module) else model.model).modules():
            method: Any = getattr(module, "_quant_method", None)
            if getattr(method, "is_monolithic", False):
                capture = functools.partial(capturer.capture, module.layer_id)
                method.apply_monolithic = _capturing(method.apply_monolithic, experts, capture)

    return bind_routed_experts_capturer


def _capturing(
    apply: Callable[..., torch.Tensor], experts: Any, capture: Callable[[torch.Tensor], None]
) -> Callable[..., Any]:
    @functools.wraps(apply)
    def apply_monolithic(*args, **kwargs):
        select = experts.select_experts

        def select_experts(*given, **named):
            weights, ids = select(*given, **named)
            capture(ids)
            return weights, ids

        experts.select_experts = select_experts
        try:
            return apply(*args, **kwargs)
        finally:
            experts.select_experts = select

    return apply_monolithic
