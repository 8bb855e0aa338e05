"""Builds vLLM's classes for GPUs on a CPU, without the kernels that it lacks there."""

import importlib
from typing import Any
from unittest import mock

import torch

__all__ = ["leave_out_kernels", "register"]

# Architectures for which vLLM has another class on CPUs -> the one for GPUs.
_FOR_GPUS = {
    **dict.fromkeys(
        ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"), "deepseek_v32.nvidia.model.DeepseekV32ForCausalLM"
    ),
    "DeepseekV4ForCausalLM": "deepseek_v4.nvidia.model.DeepseekV4ForCausalLM",
}


def leave_out_kernels() -> None:
    """Replace vLLM's kernels in this process: its models can be built and loaded, and compute nothing."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import cpu_attn

    def nothing(*args: Any, **settings: Any) -> None:
        return None

    backend = f"{cpu_attn.__name__}.CPUAttentionBackend"
    for owner, name, replaced in (
        (utils, "dispatch_cpu_unquantized_gemm", nothing),
        (experts, "select_unquantized_moe_backend", lambda *a, **k: (UnquantizedMoeBackend.TRITON, None)),
        (experts.UnquantizedFusedMoEMethod, "process_weights_after_loading", nothing),
        (CpuPlatform, "get_attn_backend_cls", classmethod(lambda *a, **k: backend)),
        (cpu_attn.CPUAttentionBackendImpl, "__init__", nothing),
        (torch.cuda, "Event", mock.Mock),
        (torch.cuda, "Stream", mock.Mock),
        (_module("deepseek_v4.nvidia.flashmla"), "compute_fp8_einsum_recipe", lambda *a: ((1, 1, 128), False)),
        (_module("kimi_k3.nvidia.model"), "maybe_init_gemm_rs_ar", nothing),
    ):
        setattr(owner, name, replaced)


def register(architecture: str, for_gpus: bool = True) -> None:
    """Import the class, because vLLM inspects other classes in a process that takes seconds to start."""
    from vllm.model_executor.models import ModelRegistry

    if for_gpus and architecture in _FOR_GPUS:
        module, _, name = _FOR_GPUS[architecture].rpartition(".")
        found = getattr(_module(module), name)
    elif architecture in ModelRegistry.models:
        found = ModelRegistry.models[architecture].load_model_cls()
    else:
        return
    ModelRegistry.register_model(architecture, found)


def _module(name: str) -> Any:
    return importlib.import_module(f"vllm.models.{name}")
