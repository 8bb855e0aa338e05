"""Shim that makes vLLM return the routed experts of tokens where its CPU kernel computes the routing itself.

Versions from 0.27 on refuse to start the server ("monolithic MoE kernel"); earlier ones report expert 0 for all tokens.
The shim captures what ``select_experts`` returns. ``test_vllm_shims.py`` fails once vLLM no longer needs it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform

from ..compat import cpu_experts_module
from . import wrap

__all__ = ["install"]

# A stack of what takes the experts of tokens; the last one belongs to the layer that is computing.
_captures: list[Callable[[torch.Tensor], None]] = []


def install() -> None:
    """Wrap the two functions, once per process; no-op on other platforms and on versions without them."""
    from vllm.v1.worker import gpu_model_runner

    experts: Any = cpu_experts_module()
    places = (
        (gpu_model_runner.GPUModelRunner, "_bind_routed_experts_capturer"),  # up to 0.28
        (gpu_model_runner, "bind_routed_experts_capturer"),
    )
    place = next((place for place in places if hasattr(*place)), None)
    if current_platform.is_cpu() and hasattr(experts, "select_experts") and place is not None:
        wrap(*place, _binding)
        wrap(experts, "select_experts", _captured)


def _captured(select: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
    def select_experts(*args, **kwargs):
        weights, ids = select(*args, **kwargs)
        if _captures:
            _captures[-1](ids)
        return weights, ids

    return select_experts


def _binding(bind: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Bind the capturer as vLLM does, and to the layers whose kernel computes the routing itself."""

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
                method.apply_monolithic = _capturing(method.apply_monolithic, capture)

    return bind_routed_experts_capturer


def _capturing(apply: Callable[..., torch.Tensor], capture: Callable[[torch.Tensor], None]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def apply_monolithic(*args, **kwargs):
        _captures.append(capture)
        try:
            return apply(*args, **kwargs)
        finally:
            _captures.pop()

    return apply_monolithic
