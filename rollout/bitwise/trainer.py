"""The trainer's part: attention, and products in the parts that vLLM's tensor-parallel workers compute."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...engine.moe.forward import runtime_of
from ...engine.moe.gemm.backends import INVARIANT
from ...engine.packing.attention import HANDLE
from ...engine.wrap_forward import wrap_forward
from .attention import attend
from .settings import check_model

__all__ = ["cut_experts", "install_in_trainer"]

# Linears whose outputs or inputs vLLM divides between workers.
_COLUMN_PARALLEL = (".q_proj", ".k_proj", ".v_proj", ".mlp.gate_proj", ".mlp.up_proj")
_ROW_PARALLEL = (".o_proj", ".mlp.down_proj")


def install_in_trainer(model: Any, tp: int) -> None:
    """Replace the attention of a model with packed rows (``engine/packing/attention.py``), before it is sharded.

    Args:
        tp: workers of vLLM that share each tensor.

    Raises:
        SettingError: as ``check_model``.
    """
    check_model(model)
    for name, module in model.named_modules():
        packed: Any = getattr(module, HANDLE, None)
        if packed is not None:
            own = dataclasses.replace(packed, real=_attention, explicit=False, lengths=lambda: None)
            setattr(module, HANDLE, own)
        if tp > 1 and isinstance(module, nn.Linear) and name.endswith(_COLUMN_PARALLEL + _ROW_PARALLEL):
            is_shared = name.endswith((".k_proj", ".v_proj")) and model.config.num_key_value_heads < tp
            product = _sum if name.endswith(_ROW_PARALLEL) else _concatenated
            wrap_forward(module, "parts", functools.partial(product, module, 1 if is_shared else tp))


def cut_experts(model: nn.Module, tp: int) -> None:
    """Let the experts of a sharded model sum ``tp`` products of their second linear, in the order of workers."""
    for module in model.modules():
        runtime = runtime_of(module)
        if runtime is not None and tp > 1:
            runtime.backend = f"{INVARIANT}:{tp}"


def _concatenated(linear: nn.Linear, tp: int, _: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return torch.cat([functional.linear(x, weight) for weight in linear.weight.chunk(tp)], dim=-1)


def _sum(linear: nn.Linear, tp: int, _: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    parts = zip(x.chunk(tp, dim=-1), linear.weight.chunk(tp, dim=1), strict=True)
    return functools.reduce(torch.add, [functional.linear(a.contiguous(), b.contiguous()) for a, b in parts])


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Compute one sequence's attention, ``[1, H, n, D]`` -> ``[1, n, H, D]``, as a function of transformers."""
    return attend(query[0], key[0], value[0], scaling).transpose(0, 1)[None], None
