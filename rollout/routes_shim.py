"""Shim: vLLM 0.27 does not return the experts that tokens took where its CPU kernel chooses them itself.

It refuses the whole server (``gpu_model_runner.py``, ``_bind_routed_experts_capturer``: "monolithic MoE kernel"),
although the kernel's experts come out of one Python function (``cpu_fused_moe.py``, ``select_experts``). A refusal for
that reason falls through to capturing what that function returns. ``tests/rollout/test_vllm_remedies.py`` fails on the
day that vLLM no longer refuses.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform

__all__ = ["install"]


def install() -> None:
    """Wrap the two functions, once per process; does nothing off the CPU platform or where vLLM has none such."""
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.v1.worker import gpu_model_runner

    select: Any = getattr(cpu_fused_moe, "select_experts", None)
    runner: Any = gpu_model_runner.GPUModelRunner
    bind = getattr(runner, "_bind_routed_experts_capturer", None)
    if select is None or bind is None or hasattr(bind, "__wrapped__"):
        return
    captures: list[Callable[[torch.Tensor], None]] = []  # of the layer that computes

    @functools.wraps(select)
    def select_experts(*args, **kwargs):
        weights, ids = select(*args, **kwargs)
        if captures:
            captures[-1](ids)
        return weights, ids

    @functools.wraps(bind)
    def _bind_routed_experts_capturer(self, capturer):
        try:
            return bind(self, capturer)
        except ValueError as error:
            if "monolithic MoE kernel" not in str(error):
                raise
        for module in self.model.modules():
            method: Any = getattr(module, "_quant_method", None)
            if getattr(method, "is_monolithic", False):
                capture = functools.partial(capturer.capture, module.layer_id)
                method.apply_monolithic = _capturing(method.apply_monolithic, capture, captures)

    cpu_fused_moe.select_experts = select_experts
    runner._bind_routed_experts_capturer = _bind_routed_experts_capturer


def _capturing(
    apply: Callable[..., torch.Tensor],
    capture: Callable[[torch.Tensor], None],
    captures: list[Callable[[torch.Tensor], None]],
) -> Callable[..., torch.Tensor]:
    @functools.wraps(apply)
    def apply_monolithic(*args, **kwargs):
        captures.append(capture)
        try:
            return apply(*args, **kwargs)
        finally:
            captures.pop()

    return apply_monolithic
