"""The experts function that transformers calls in place of an experts module's forward.

One function serves every family on transformers' experts interface: it reads the layout of the weights from the flags
of the module, and calls the module's own activation. It brings tokens to their experts in one of four ways:

    deepep.exchange      DeepEP's kernels                           ep > 1, engine.dispatcher=deepep
    overlap.exchange     all-to-alls that overlap with compute      ep > 1, several chunks or overlapped shared experts
    fused.on_tokens      two autograd nodes that save little        otherwise, if the backend is torch or triton
    dispatch.dispatch    then compute and combine, one by one       otherwise: reference, transformers:...

``install.py`` chooses the first two (``ExpertsRuntime.exchange``), ``experts_forward`` the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat.function_modes import without_function_modes
from ..compat.transformers_names import ALL_EXPERTS_FUNCTIONS
from . import fused
from .collectives.weights import with_whole_outputs
from .dispatch import combine, deferred_router_grad, dispatch, start_dispatch_plans, to_slots
from .find import CustomExperts
from .gemm.backends import (
    EXPERTS_IMPLEMENTATION,
    backend_named,
    has_backend,
    supports_grouped_mm,
    torch_grouped_mm,
    zeroes_empty_groups,
)
from .gemm.linear import Linear
from .registered import compute_registered

__all__ = [
    "Adapters",
    "ExpertsRuntime",
    "adapt_experts",
    "attach",
    "experts_shared_by",
    "linears",
    "rows_computed",
]

_HANDLE, _ADAPTERS = "_epfsdp2", "_epfsdp2_adapters"


class TokenExchange(Protocol):
    """Dispatch, compute and combine in one call: ``overlap.exchange`` or ``deepep.exchange``, their options bound."""

    def __call__(
        self,
        hidden_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        compute: Callable[..., torch.Tensor],
    ) -> torch.Tensor: ...


@dataclass
class ExpertsRuntime:
    """What the experts function needs to know about one module; the only thing attached to it.

    Custom experts get it by ``set_expert_parallel`` (``find.CustomExperts``).
    """

    num_experts: int
    group: dist.ProcessGroup | None
    """The EP group, ``None`` where a single rank holds all experts."""
    backend: str = "torch"
    """Name of a ``backends.BackendChoice``."""
    exchange: TokenExchange | None = None
    """Replaces the synchronous all-to-alls, where the settings say so."""
    etp_group: dist.ProcessGroup | None = None
    """The ranks that share each expert, ``None`` where this rank holds its experts whole."""
    rows_computed: int = 0
    """Rows that this rank's experts have computed so far, recomputations included; of cut experts, its part of them."""


class Adapters(Protocol):
    """What the experts function needs to know about low-rank adapters (``lora/adapters.py``)."""

    enabled: bool


@dataclass(frozen=True)
class _Adapted:
    """The adapters of an experts module, and what those of each of its weights are multiplied by."""

    adapters: Adapters
    scalings: dict[str, float]


def attach(module: nn.Module, runtime: ExpertsRuntime) -> None:
    """Give an experts module its runtime record, which its forward reads."""
    if isinstance(module, CustomExperts):
        module.set_expert_parallel(runtime)
    else:
        setattr(module, _HANDLE, runtime)


def adapt_experts(module: nn.Module, adapters: Adapters, weight: str, scaling: float) -> None:
    """Add a weight's ``<weight>_lora_A`` ``[E, r, in]`` and ``<weight>_lora_B`` ``[E, out, r]`` in the forward."""
    adapted: _Adapted = getattr(module, _ADAPTERS, None) or _Adapted(adapters, {})
    adapted.scalings[weight] = scaling
    setattr(module, _ADAPTERS, adapted)


def _scaling(module: nn.Module, weight: str) -> float | None:
    """Return what a weight's adapter is multiplied by; None where there is none, or it is left out."""
    adapted: _Adapted | None = getattr(module, _ADAPTERS, None)
    return adapted.scalings.get(weight) if adapted is not None and adapted.adapters.enabled else None


def rows_computed(module: nn.Module) -> int | None:
    """Return how many (token, expert) pairs a module's experts on this rank have computed; None for custom experts.

    Each of the ranks that share an expert (``experts_shared_by``) computes a part of a pair, and counts it.
    """
    runtime: ExpertsRuntime | None = getattr(module, _HANDLE, None)
    return None if runtime is None else runtime.rows_computed


def experts_shared_by(module: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that share each expert of a module; None where a rank holds its experts whole."""
    runtime: ExpertsRuntime | None = getattr(module, _HANDLE, None)
    return None if runtime is None else runtime.etp_group


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
    # Those that override the router's choice (router/topk_override.py) have nothing to do here, and would be asked at
    # each call of torch.
    with without_function_modes():
        return _experts_forward(self, getattr(self, _HANDLE), hidden_states, top_k_index, top_k_weights)


def _experts_forward(
    self: Any,
    runtime: ExpertsRuntime,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    weight = {name: _local(p) for name, p in self.named_parameters(recurse=False)}
    if runtime.etp_group is not None:
        weight = with_whole_outputs(weight, runtime.etp_group)
    hidden = hidden_states.to(weight["down_proj"].dtype)

    def local_experts(
        rows_RD: torch.Tensor,
        counts_e: torch.Tensor,
        scale_R: torch.Tensor | None = None,
        order_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        runtime.rows_computed += rows_RD.shape[0]
        return compute(self, weight, rows_RD, counts_e, scale_R, order_R)

    if runtime.exchange is not None:
        return runtime.exchange(hidden, top_k_index, top_k_weights, local_experts).to(hidden_states.dtype)
    if not has_backend(runtime.backend):
        dispatched = dispatch(hidden, top_k_index, runtime.num_experts, runtime.group, runtime.etp_group)
        out = local_experts(dispatched.rows_RD, dispatched.counts_e)
        return combine(out, dispatched, top_k_weights, runtime.group).to(hidden_states.dtype)
    pending = start_dispatch_plans(top_k_index, runtime.num_experts, runtime.group, etp_group=runtime.etp_group)
    up, down = linears(self, weight)
    backend = backend_named(runtime.backend)
    to_send = []
    if runtime.group is not None or runtime.etp_group is not None:
        to_send.append(to_slots(hidden.detach(), pending.slot_orders[0], top_k_index.shape[-1], backend))
    (plan,) = pending.wait()
    runtime.rows_computed += plan.rows
    return fused.on_tokens(self, backend, up, down, hidden, top_k_weights, plan, hidden_states.dtype, to_send)


def compute(
    module: Any,
    weight: Mapping[str, torch.Tensor],
    rows_RD: torch.Tensor,
    counts_e: torch.Tensor,
    scale_R: torch.Tensor | None = None,
    order_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the local experts on rows that are grouped by expert; returns ``(R, D)``.

    Args:
        module: the experts module.
        weight: its own parameters by name, local to this rank.
        rows_RD: in the parameters' dtype.
        counts_e: int64 ``(e,)``, rows per local expert, summing to ``R``; entries may be 0.
        scale_R: routing weights that are applied on the source rank, whose gradient is made here
            (``dispatch.deferred_router_grad``).
        order_R: of a backend that reads rows through an index: rows are grouped by it (``fused.on_rows``).
    """
    runtime: ExpertsRuntime = getattr(module, _HANDLE)
    if has_backend(runtime.backend):
        up, down = linears(module, weight)
        return fused.on_rows(module, backend_named(runtime.backend), up, down, rows_RD, counts_e, scale_R, order_R)
    assert order_R is None, f"{runtime.backend} reads no rows through an index"
    if runtime.backend == "reference":
        h = _linear(module, rows_RD, _up_name(module), weight, counts_e)
        h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
        out = _linear(module, h, "down_proj", weight, counts_e)
    else:
        out = compute_registered(runtime.backend, module, weight, rows_RD, counts_e)
    return out if scale_R is None else deferred_router_grad(out, scale_R)


def linears(module: Any, weight: Mapping[str, torch.Tensor]) -> tuple[Linear, Linear]:
    """Return an experts module's first and second linear, made of its own parameters by name."""
    names = (_up_name(module), "down_proj")
    up, down = (Linear.of(name, weight, module.is_transposed, _scaling(module, name)) for name in names)
    return up, down


def _up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _linear(
    module: Any, rows: torch.Tensor, name: str, weight: Mapping[str, torch.Tensor], counts_e: torch.Tensor
) -> torch.Tensor:
    """Apply one of the experts' linears, with its adapter if it has one, in plain operators."""
    out = grouped_linear(rows, weight[name], counts_e, weight.get(f"{name}_bias"), module.is_transposed)
    scaling = _scaling(module, name)
    if scaling is None:
        return out
    low = grouped_linear(rows, weight[f"{name}_lora_A"], counts_e, None, False)
    return out + scaling * grouped_linear(low, weight[f"{name}_lora_B"], counts_e, None, False)


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
    if torch_grouped_mm is not None and supports_grouped_mm(rows, in_out) and zeroes_empty_groups():  # in backward
        return torch_grouped_mm(rows, in_out, offs=offsets)
    groups = rows.tensor_split(offsets[:-1].tolist())
    return torch.cat([group @ weight for group, weight in zip(groups, in_out.unbind(), strict=True)])


def _local(param: torch.Tensor) -> torch.Tensor:
    # FSDP gathers back to the parameter's type before sharding: a DTensor over ``ep`` alone.
    return param.to_local() if isinstance(param, DTensor) else param


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)
