"""The experts function that transformers calls in place of an experts module's forward.

One function serves every family on transformers' experts interface: the module's flags give the layout of its weights,
and its own code computes the activation. Tokens reach their experts in one of four ways:

    deepep.exchange      DeepEP's kernels                            ep > 1 and engine.dispatcher=deepep
    overlap.exchange     asynchronous all-to-alls beside compute     ep > 1, several chunks or overlapped shared experts
    fused.on_tokens      two autograd nodes that save little         otherwise, with backend torch or triton
    dispatch.dispatch    then ``compute`` and ``combine``            otherwise: reference, transformers:NAME

``install_experts_forward`` chooses the first two (``ExpertsRuntime.exchange``), ``experts_forward`` the others.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat.function_modes import without_function_modes
from ..compat.transformers_names import ALL_EXPERTS_FUNCTIONS, set_experts_implementation
from . import deepep, fused, overlap
from .collectives.weights import with_whole_experts, with_whole_outputs
from .dispatch import combine, deferred_router_grad, dispatch, start_dispatch_plans, to_slots
from .find import CustomExperts, ExpertsInfo
from .gemm.backends import (
    EXPERTS_IMPLEMENTATION,
    REGISTERED,
    backend_named,
    has_backend,
    supports_grouped_mm,
    torch_grouped_mm,
    zeroes_empty_groups,
)
from .gemm.linear import Linear
from .shared_experts import SharedExperts

__all__ = ["ExpertsRuntime", "adapt_experts", "attach", "install_experts_forward", "linears", "runtime_of"]

_HANDLE, _ADAPTERS = "_epfsdp2", "_epfsdp2_adapters"

TokenExchange = Callable[..., torch.Tensor]
"""``overlap.exchange`` or ``deepep.exchange`` with their options bound: dispatch, compute and combine in one call."""


@dataclass
class ExpertsRuntime:
    """The state that the experts function attaches to a module.

    Custom experts get it by ``set_expert_parallel`` (``find.CustomExperts``).
    """

    num_experts: int  # ``E``
    group: dist.ProcessGroup | None  # over ``ep``, ``None`` where a single rank holds all experts
    backend: str = "torch"  # name of a ``backends.BackendChoice``
    exchange: TokenExchange | None = None  # replaces the synchronous all-to-alls, where the settings ask for it
    etp_group: dist.ProcessGroup | None = None  # the ranks that share each expert
    # Gathers the weights over the ranks that share each expert, in place of rows: outputs are no sums of partial ones.
    gather_weights: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    # (Token, expert) pairs that this rank's experts have computed so far, recomputations included. Each rank of
    # ``etp_group`` counts a pair.
    rows_computed: int = 0


def install_experts_forward(
    model: Any,
    experts: Sequence[ExpertsInfo],
    group: dist.ProcessGroup | None,
    etp_group: dist.ProcessGroup | None,
    backend: str,
    *,
    dispatcher: str = "all_to_all",
    chunks: int = 1,
    overlap_shared_experts: bool = False,
    batch_invariant: bool = False,
) -> None:
    """Replace each experts module's computation by dispatch, the computation of the local experts, and combine.

    Args:
        dispatcher: one of ``deepep.DISPATCHERS``.
        chunks: parts in which a layer's tokens are dispatched, one while another computes.
        batch_invariant: gather weights instead of rows over ``etp_group``.

    Raises:
        SettingError: as ``overlap.check_overlap``.
    """
    overlap.check_overlap(chunks, overlap_shared_experts, dispatcher, model, experts)
    whole_group, etp_group = (etp_group, None) if batch_invariant else (None, etp_group)
    for info in experts:
        gather = functools.partial(with_whole_experts, dims=info.etp_dims, group=whole_group) if whole_group else None
        exchange: TokenExchange | None = None
        options: dict[str, Any] = {"num_experts": info.num_experts, "group": group, "backend": backend_named(backend)}
        if group is not None and dispatcher == "deepep":
            exchange = functools.partial(deepep.exchange, **options)
        elif group is not None and (chunks > 1 or overlap_shared_experts):
            shared = SharedExperts(model.get_submodule(info.block), info.module) if overlap_shared_experts else None
            exchange = functools.partial(overlap.exchange, **options, etp_group=etp_group, chunks=chunks, shared=shared)
        attach(info.module, ExpertsRuntime(info.num_experts, group, backend, exchange, etp_group, gather))
    if on_interface := [info.module for info in experts if not isinstance(info.module, CustomExperts)]:
        set_experts_implementation(model, on_interface, EXPERTS_IMPLEMENTATION)


def attach(module: nn.Module, runtime: ExpertsRuntime) -> None:
    """Attach the runtime that an experts module's forward reads."""
    if isinstance(module, CustomExperts):
        module.set_expert_parallel(runtime)
    else:
        setattr(module, _HANDLE, runtime)


def runtime_of(module: nn.Module) -> ExpertsRuntime | None:
    """Return the runtime of an experts module; ``None`` for any other module and for custom experts."""
    return getattr(module, _HANDLE, None)


def adapt_experts(module: nn.Module, adapters: Any, weight: str, scaling: float) -> None:
    """Add a weight's ``<weight>_lora_A`` ``[E, r, in]`` and ``<weight>_lora_B`` ``[E, out, r]`` in the forward.

    ``adapters.enabled`` switches them.
    """
    module.__dict__.setdefault(_ADAPTERS, {})[weight] = adapters, scaling


def _scaling(module: nn.Module, weight: str) -> float | None:
    """Return the scaling of a weight's adapter; ``None`` without one, or where adapters are disabled."""
    adapters, scaling = getattr(module, _ADAPTERS, {}).get(weight, (None, None))
    return scaling if adapters is not None and adapters.enabled else None


@without_function_modes()  # the modes that override a router ignore these calls, and would slow down each of them
def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Dispatch, compute the local experts, combine; returns ``(T, D)`` in the dtype of ``hidden_states``.

    Args:
        self: the experts module, its parameters gathered over ``ep_fsdp``.
        top_k_index: ``(T, K)`` global expert ids; not modified, a token may list an expert twice.
        top_k_weights: ``(T, K)`` routing weights, any float dtype.
    """
    runtime: ExpertsRuntime = getattr(self, _HANDLE)
    # FSDP gathers back to the parameter's type before sharding: a DTensor over ``ep`` alone.
    own = self.named_parameters(recurse=False)
    weight = {name: param.to_local() if isinstance(param, DTensor) else param for name, param in own}
    if runtime.gather_weights is not None:
        weight = runtime.gather_weights(weight)
    elif runtime.etp_group is not None:
        weight = with_whole_outputs(weight, runtime.etp_group)
    hidden = hidden_states.to(weight["down_proj"].dtype)

    def local_experts(rows_RD: torch.Tensor, *grouping: Any) -> torch.Tensor:
        runtime.rows_computed += rows_RD.shape[0]
        return compute(self, weight, rows_RD, *grouping)

    if runtime.exchange is not None:
        return runtime.exchange(hidden, top_k_index, top_k_weights, local_experts).to(hidden_states.dtype)
    if not has_backend(runtime.backend):
        dispatched = dispatch(hidden, top_k_index, runtime.num_experts, runtime.group, runtime.etp_group)
        out = local_experts(dispatched.rows_RD, dispatched.counts_e)
        return combine(out, dispatched, top_k_weights).to(hidden_states.dtype)
    pending = start_dispatch_plans(top_k_index, runtime.num_experts, runtime.group, etp_group=runtime.etp_group)
    backend = backend_named(runtime.backend)
    to_send = []
    if runtime.group is not None or runtime.etp_group is not None:
        to_send.append(to_slots(hidden.detach(), pending.slot_orders[0], top_k_index.shape[-1], backend))
    (plan,) = pending.wait()
    runtime.rows_computed += plan.rows
    experts = fused.Experts(self, backend, *linears(self, weight))
    return fused.on_tokens(experts, hidden, top_k_weights, plan, hidden_states.dtype, to_send)


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
        weight: the module's own parameters by name, local to this rank.
        counts_e: int64 ``(e,)``, rows per local expert, summing to ``R``; entries may be 0.
        scale_R: routing weights that the source rank applies; their gradient is computed here
            (``dispatch.deferred_router_grad``).
        order_R: the permutation that groups the rows, for a backend that reads them through an index.
    """
    backend = getattr(module, _HANDLE).backend
    if has_backend(backend):
        experts = fused.Experts(module, backend_named(backend), *linears(module, weight))
        return fused.on_rows(experts, rows_RD, counts_e, scale_R, order_R)
    if backend == "reference":
        up, down = linears(module, weight)
        h = _plain(up, rows_RD, counts_e)
        out = _plain(down, module._apply_gate(h) if module.has_gate else module.act_fn(h), counts_e)
    else:
        out = _registered(backend, module, weight, rows_RD, counts_e)
    return out if scale_R is None else deferred_router_grad(out, scale_R)


def linears(module: Any, weight: Mapping[str, torch.Tensor]) -> tuple[Linear, Linear]:
    """Return an experts module's first and second linear from its own parameters by name."""
    names = ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"
    up, down = (Linear.of(name, weight, module.is_transposed, _scaling(module, name)) for name in names)
    return up, down


def _plain(linear: Linear, rows: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
    """Apply one of the experts' linears, with its adapter if it has one, in plain operators."""
    out = grouped_linear(rows, linear.weight, counts_e, linear.bias, linear.is_transposed)
    if linear.lora_A is None or linear.lora_B is None:
        return out
    low = grouped_linear(rows, linear.lora_A, counts_e, None, False)
    return out + linear.scaling * grouped_linear(low, linear.lora_B, counts_e, None, False)


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, counts_e: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool
) -> torch.Tensor:
    """Apply expert ``i``'s linear to the ``i``-th group of rows, ``(R, in)`` to ``(R, out)``; ``R`` may be 0.

    The weight is ``(e, out, in)``, or ``(e, in, out)`` if ``is_transposed``. Its gradient is zero for experts without
    rows, never ``None``, which FSDP would skip on this rank only.
    """
    in_out = weight if is_transposed else weight.transpose(-2, -1)
    offsets = torch.cumsum(counts_e, dim=0).to(torch.int32)
    with torch.autocast(rows.device.type, enabled=False):
        rows = rows.to(weight.dtype)  # under autocast an activation may return another dtype than it got
        if supports_grouped_mm(rows, in_out) and zeroes_empty_groups():  # in backward
            out = torch_grouped_mm(rows, in_out, offs=offsets)
        else:
            groups = rows.tensor_split(offsets[:-1].tolist())
            out = torch.cat([group @ weight for group, weight in zip(groups, in_out.unbind(), strict=True)])
    if bias is not None:
        out = out + torch.repeat_interleave(bias, counts_e, dim=0, output_size=rows.shape[0])
    return out


class _LocalExperts:
    """A view of an experts module with this rank's experts."""

    def __init__(self, module: Any, weight: Mapping[str, torch.Tensor], num_experts: int):
        self._module, self._weight, self.num_experts = module, weight, num_experts

    def __getattr__(self, name: str) -> Any:
        return self._weight[name] if name in self._weight else getattr(self._module, name)


def _registered(
    backend: str, module: Any, weight: Mapping[str, torch.Tensor], rows_RD: torch.Tensor, counts_e: torch.Tensor
) -> torch.Tensor:
    """Compute as ``compute`` by a function that is registered with transformers, which expects the experts of a model.

    To it a row is a token with one expert and a routing weight of 1, because combine applies the weights.
    """
    if rows_RD.shape[0] == 0:
        # A function may not expect this. Gradients are dense: FSDP would skip a None on this rank only.
        return rows_RD + sum(param.flatten()[:0].sum() for param in weight.values())
    function = ALL_EXPERTS_FUNCTIONS[backend.removeprefix(REGISTERED)]
    experts_R = torch.repeat_interleave(counts_e, output_size=rows_RD.shape[0])
    local = _LocalExperts(module, weight, counts_e.shape[0])
    return function(local, rows_RD, experts_R[:, None], rows_RD.new_ones(rows_RD.shape[0], 1))


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)
