"""The experts function that transformers calls in place of an experts module's forward.

One function for every family on transformers' experts interface: the layout of the weights is read from the flags of
the module, the activation is the module's own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .dispatch import combine, dispatch
from .find import ComputesItself

__all__ = ["EXPERTS_IMPLEMENTATION", "Adapters", "ExpertParallel", "adapt_experts", "attach", "rows_computed"]

EXPERTS_IMPLEMENTATION = "epfsdp2"
_HANDLE, _ADAPTERS = "_epfsdp2", "_epfsdp2_adapters"


class Exchange(Protocol):
    """``overlap.exchange`` and ``deepep.exchange``, as far as the experts function knows them."""

    def __call__(
        self,
        hidden_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor: ...


@dataclass
class ExpertParallel:
    """What the experts function needs to know about one module; the only thing attached to it."""

    num_experts: int
    group: dist.ProcessGroup | None
    """The EP group, ``None`` where a single rank holds all experts."""
    exchange: Exchange | None = None
    """What brings tokens to the ranks of a group and back in place of ``dispatch`` and ``combine``, if anything."""
    rows_computed: int = 0
    """By this rank's experts so far, recomputations included."""


class Adapters(Protocol):
    """What the experts function needs to know about low-rank adapters (``lora.py``)."""

    enabled: bool
    scaling: float


def attach(module: nn.Module, runtime: ExpertParallel) -> None:
    """Tell an experts module how its experts are spread."""
    if isinstance(module, ComputesItself):
        module.set_expert_parallel(runtime)
    else:
        setattr(module, _HANDLE, runtime)


def adapt_experts(module: nn.Module, adapters: Adapters) -> None:
    """Have an experts module's ``<weight>_lora_A`` ``[E, r, in]`` and ``<weight>_lora_B`` ``[E, out, r]`` take part."""
    setattr(module, _ADAPTERS, adapters)


def rows_computed(module: nn.Module) -> int | None:
    """(token, expert) pairs that a module's experts on this rank have computed; None if it computes them itself."""
    runtime: ExpertParallel | None = getattr(module, _HANDLE, None)
    return None if runtime is None else runtime.rows_computed


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Dispatch, compute the local experts, combine.

    Args:
        self: the experts module, its parameters gathered over ``ep_fsdp``.
        hidden_states: ``(T, D)``.
        top_k_index: ``(T, K)`` global expert ids; not modified, a token may list an expert twice.
        top_k_weights: ``(T, K)`` routing weights, any float dtype.

    Returns:
        ``(T, D)`` in the dtype of ``hidden_states``.
    """
    runtime: ExpertParallel = getattr(self, _HANDLE)
    weight = {name: _local(p) for name, p in self.named_parameters(recurse=False)}
    hidden = hidden_states.to(weight["down_proj"].dtype)
    if runtime.exchange is not None:

        def local_experts(rows_RD: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
            runtime.rows_computed += rows_RD.shape[0]
            return compute(self, weight, rows_RD, counts_e)

        return runtime.exchange(hidden, top_k_index, top_k_weights, local_experts).to(hidden_states.dtype)
    sent = dispatch(hidden, top_k_index, runtime.num_experts, runtime.group)
    runtime.rows_computed += sent.rows_RD.shape[0]
    out = compute(self, weight, sent.rows_RD, sent.counts_e)
    return combine(out, sent, top_k_weights, runtime.group).to(hidden_states.dtype)


def compute(
    module: Any, weight: Mapping[str, torch.Tensor], rows_RD: torch.Tensor, counts_e: torch.Tensor
) -> torch.Tensor:
    """What the local experts make of rows grouped by expert, ``(R, D)``."""
    h = _linear(module, rows_RD, "gate_up_proj" if module.has_gate else "up_proj", weight, counts_e)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    return _linear(module, h, "down_proj", weight, counts_e)


def _linear(
    module: Any, rows: torch.Tensor, name: str, weight: Mapping[str, torch.Tensor], counts_e: torch.Tensor
) -> torch.Tensor:
    """One of the experts' linears, with its adapter if it has one."""
    out = grouped_linear(rows, weight[name], counts_e, weight.get(f"{name}_bias"), module.is_transposed)
    adapters: Adapters | None = getattr(module, _ADAPTERS, None)
    if adapters is None or not adapters.enabled or f"{name}_lora_A" not in weight:
        return out
    low = grouped_linear(rows, weight[f"{name}_lora_A"], counts_e, None, False)
    return out + adapters.scaling * grouped_linear(low, weight[f"{name}_lora_B"], counts_e, None, False)


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, counts_e: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool
) -> torch.Tensor:
    """Apply expert ``i``'s linear to the ``i``-th group of rows.

    Args:
        rows: ``(R, in)`` grouped by expert; ``R`` may be 0.
        weight: ``(e, out, in)``, or ``(e, in, out)`` where ``is_transposed``.
        counts_e: int64 ``(e,)``, rows per expert, summing to ``R``; entries may be 0.
        bias: ``(e, out)`` or ``None``.

    Returns:
        ``(R, out)``. The gradient of the weight is dense: zero for experts without rows, never ``None``, which FSDP
        would skip on this rank only.
    """
    in_out = weight if is_transposed else weight.transpose(-2, -1)
    offsets = torch.cumsum(counts_e, dim=0).to(torch.int32)
    with torch.autocast(rows.device.type, enabled=False):
        # Under autocast an activation may come back in another dtype than it was given.
        out = _grouped_mm(rows.to(weight.dtype), in_out, offsets)
    if bias is not None:
        out = out + torch.repeat_interleave(bias, counts_e, dim=0, output_size=rows.shape[0])
    return out


def _grouped_mm(rows: torch.Tensor, in_out: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    if _native_grouped_mm is not None and _fits_the_kernel(rows, in_out):
        return _native_grouped_mm(rows, in_out, offs=offsets)
    groups = rows.tensor_split(offsets[:-1].tolist())
    return torch.cat([group @ weight for group, weight in zip(groups, in_out.unbind(), strict=True)])


def _fits_the_kernel(rows: torch.Tensor, in_out: torch.Tensor) -> bool:
    """What torch's grouped GEMM asks for: 16-byte rows; and on an accelerator bfloat16, and at least one row."""
    aligned = all(size * in_out.element_size() % 16 == 0 for size in in_out.shape[-2:])
    return aligned and (rows.device.type == "cpu" or (rows.dtype == torch.bfloat16 and rows.shape[0] > 0))


def _local(param: torch.Tensor) -> torch.Tensor:
    # FSDP gathers back to the parameter's type before sharding: a DTensor over ``ep`` alone.
    return param.to_local() if isinstance(param, DTensor) else param


_native_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)
