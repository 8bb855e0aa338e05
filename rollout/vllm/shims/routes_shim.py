"""Shim that makes vLLM return the routed experts of tokens where its CPU kernel computes the routing itself.

Versions from 0.27 on refuse to start the server ("monolithic MoE kernel"); earlier ones report expert 0 for all tokens.
The kernel computes its routing in one Python function (``select_experts``), whose result the shim captures.
``test_vllm_shims.py`` fails once vLLM no longer needs the shim.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform

from ..compat import cpu_experts_module

__all__ = ["install"]


def install() -> None:
    """Wrap the two functions, once per process; no-op on other platforms and on versions without them."""
    if not current_platform.is_cpu():
        return
    from vllm.v1.worker import gpu_model_runner

    experts: Any = cpu_experts_module()
    select: Any = getattr(experts, "select_experts", None)
    runner: Any = gpu_model_runner.GPUModelRunner
    if select is None or hasattr(select, "__wrapped__"):
        return
    captures: list[Callable[[torch.Tensor], None]] = []  # stack; the last one belongs to the layer that is computing

    @functools.wraps(select)
    def select_experts(*args, **kwargs):
        weights, ids = select(*args, **kwargs)
        if captures:
            captures[-1](ids)
        return weights, ids

    bind: Any = getattr(runner, "_bind_routed_experts_capturer", None)  # up to 0.28
    if bind is not None:

        @functools.wraps(bind)
        def _bind_routed_experts_capturer(self, capturer):
            _bind(lambda: bind(self, capturer), self.model, capturer, captures)

        runner._bind_routed_experts_capturer = _bind_routed_experts_capturer
    elif (bind := getattr(gpu_model_runner, "bind_routed_experts_capturer", None)) is not None:

        @functools.wraps(bind)
        def bind_routed_experts_capturer(model, capturer):
            _bind(lambda: bind(model, capturer), model, capturer, captures)

        gpu_model_runner.bind_routed_experts_capturer = bind_routed_experts_capturer
    else:
        return
    experts.select_experts = select_experts


def _bind(
    stock: Callable[[], None], model: torch.nn.Module, capturer: Any, captures: list[Callable[[torch.Tensor], None]]
) -> None:
    """Bind the capturer as vLLM does, and to the layers whose kernel computes the routing itself."""
    try:
        stock()
    except ValueError as error:
        if "monolithic" not in str(error):
            raise
    for module in model.modules():
        method: Any = getattr(module, "_quant_method", None)
        if getattr(method, "is_monolithic", False):
            capture = functools.partial(capturer.capture, module.layer_id)
            method.apply_monolithic = _capturing(method.apply_monolithic, capture, captures)


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
