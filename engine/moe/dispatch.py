"""Send each token to the ranks that hold its experts, and return the results.

Shapes: ``T`` tokens, ``K`` experts per token, ``D`` hidden, ``E`` experts, ``e = E / ep`` experts on this rank, ``R``
rows received. A *slot* is one (token, expert) pair; there are ``T * K``.

Slots are sorted by global expert, hence by destination rank. Received rows are rank-major; they are permuted to
expert-major order, which the grouped GEMM needs. Only sizes depend on the data. A rank without tokens, an expert
without rows and a token that lists one expert twice run the same collectives in the same order.

``dispatch`` and ``combine`` are the plain pair. ``fused.on_tokens`` and ``overlap.exchange`` consist of the same
pieces and save less for backward.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from .collectives.counts import start_counts
from .collectives.rows import AllToAll, Gather, RowExchange, exchange_rows
from .gemm.backends import TORCH, Backend, inverse

__all__ = [
    "DispatchPlan",
    "combine",
    "count_sorted",
    "deferred_router_grad",
    "dispatch",
    "keep_plans",
    "permute",
    "slot_weights",
    "sort_keys",
    "start_dispatch_plans",
    "to_slots",
    "weighted_combine",
]


@dataclass(frozen=True)
class DispatchPlan:
    """The order of slots and the splits of the all-to-all for some tokens (``start_dispatch_plans``)."""

    counts_e: torch.Tensor  # int64 ``(e,)``, rows of each local expert
    slot_order: torch.Tensor  # int64 ``(T * K,)``, slots in the order of sending
    row_order: torch.Tensor | None  # int64 ``(R,)``, received rows in expert order; ``None`` if ``ep == etp == 1``
    all_to_all: RowExchange  # sends slots to the ranks of their experts

    @property
    def rows(self) -> int:
        """``R``."""
        return self.slot_order.numel() if self.row_order is None else self.row_order.numel()


@dataclass(frozen=True)
class Dispatched(DispatchPlan):
    """A plan with the rows that were received, grouped by local expert."""

    rows_RD: torch.Tensor


def dispatch(
    hidden_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None,
    etp_group: dist.ProcessGroup | None = None,
) -> Dispatched:
    """Send every slot's hidden state to the rank of its expert; differentiable.

    Args:
        experts_TK: global expert ids, any integer dtype; read only.
        group: the EP group, ``None`` where one rank holds all experts.
        etp_group: the ranks that share each expert, ``None`` where a rank holds its experts whole.
    """
    pending = start_dispatch_plans(experts_TK, num_experts, group, etp_group=etp_group)
    sent_SD = to_slots(hidden_TD, pending.slot_orders[0], experts_TK.shape[-1])
    (plan,) = pending.wait()
    if plan.row_order is None:
        return Dispatched(**vars(plan), rows_RD=sent_SD)
    received_RD = exchange_rows(sent_SD, plan.all_to_all)
    return Dispatched(**vars(plan), rows_RD=permute(received_RD, plan.row_order))


@dataclass(frozen=True)
class PendingPlans:
    """Plans that lack the sizes of other ranks; ``wait`` is the one host sync of a layer's forward, called once.

    ``slot_orders`` of the chunks are for work that is queued before the wait.
    """

    slot_orders: list[torch.Tensor]
    wait: Callable[[], list[DispatchPlan]]


def start_dispatch_plans(
    experts_TK: torch.Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None,
    chunks: int = 1,
    etp_group: dist.ProcessGroup | None = None,
) -> PendingPlans:
    """Start to build the plan of each chunk of tokens, with one all-to-all of counts for all of them.

    A recomputation inside of ``keep_plans`` reuses the plans of the forward: it sends nothing and does not wait.
    All ranks of the group have the same number of chunks; the other arguments are those of ``dispatch``.
    """
    tape, replayed = getattr(_kept, "plans", (None, None))
    if replayed is not None:
        plans = [_with_orders(plan, torch.int64) for plan in next(replayed)]
        return PendingPlans([plan.slot_order for plan in plans], lambda: plans)

    def keep(plans: list[DispatchPlan]) -> list[DispatchPlan]:
        if tape is not None:
            tape.append([_with_orders(plan, torch.int32) for plan in plans])
        return plans

    (tokens, k), keys_below = experts_TK.shape, chunks * num_experts
    keys = experts_TK.long()
    if chunks > 1:  # by chunk, then by expert
        chunk_T = torch.arange(tokens, device=keys.device) * chunks // max(tokens, 1)
        keys = keys + (chunk_T * num_experts).unsqueeze(1)
    keys, order = sort_keys(keys.reshape(-1), keys_below)
    slot_orders = _split_order(order, [k * -(-i * tokens // chunks) for i in range(chunks + 1)])
    counts = count_sorted(keys, keys_below).view(chunks, num_experts)
    if group is None and etp_group is None:
        local = AllToAll([], [], None)
        plans = [DispatchPlan(c, order, None, local) for c, order in zip(counts, slot_orders, strict=True)]
        return PendingPlans(slot_orders, lambda: keep(plans))
    ep = dist.get_world_size(group) if group is not None else 1
    sent = counts.view(chunks, ep, -1).transpose(0, 1).contiguous()  # [destination rank, chunk, local expert]
    pending = start_counts(sent, group, etp_group)

    def wait() -> list[DispatchPlan]:
        received, sizes_of_chunks = pending()
        exchanges = [_row_exchange(sizes, ep, group, etp_group) for sizes in sizes_of_chunks]
        sources, _, e = received.shape
        row_bounds = [0, *itertools.accumulate(sum(sizes[2 * ep :] or sizes[ep:]) for sizes in sizes_of_chunks)]
        local_expert = torch.arange(chunks * e, device=received.device).view(chunks, 1, e)
        row_expert = torch.repeat_interleave(
            local_expert.expand(chunks, sources, e).reshape(-1),
            received.transpose(0, 1).reshape(-1),
            output_size=row_bounds[-1],
        )
        row_orders = _split_order(sort_keys(row_expert, chunks * e)[1], row_bounds)
        fields = zip(received.sum(0).unbind(), slot_orders, row_orders, exchanges, strict=True)
        return keep([DispatchPlan(*of_chunk) for of_chunk in fields])

    return PendingPlans(slot_orders, wait)


def _row_exchange(
    sizes: list[int], ep: int, group: dist.ProcessGroup | None, etp_group: dist.ProcessGroup | None
) -> RowExchange:
    """Return the exchange for ``sizes``: rows to each EP rank, from each, and of each rank of ``etp``, its own last."""
    all_to_all = AllToAll(sizes[:ep], sizes[ep : 2 * ep], group)
    if etp_group is None:
        return all_to_all
    *others, own = sizes[2 * ep :]
    others.insert(dist.get_rank(etp_group), own)
    return Gather(all_to_all, others, etp_group)


_kept = threading.local()  # backward, which recomputes, may run in another thread


@contextmanager
def keep_plans(tape: list[list[DispatchPlan]], replay: bool) -> Iterator[None]:
    """Append the plans that are built to ``tape``, or reuse them; every token must be routed as before."""
    before, _kept.plans = getattr(_kept, "plans", (None, None)), (tape, iter(tape) if replay else None)
    try:
        yield
    finally:
        _kept.plans = before


def _with_orders(plan: DispatchPlan, dtype: torch.dtype) -> DispatchPlan:
    rows = None if plan.row_order is None else plan.row_order.to(dtype)
    return replace(plan, slot_order=plan.slot_order.to(dtype), row_order=rows)


def sort_keys(keys: torch.Tensor, below: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort integers from -1 to ``below`` stably; return the keys and their order.

    Keys are int16 where that suffices, because a GPU's radix sort takes a pass per byte of a key.
    """
    return torch.sort(keys.to(torch.int16) if below <= 2**15 else keys, stable=True)


def count_sorted(keys: torch.Tensor, below: int) -> torch.Tensor:
    """Count each of the integers from 0 to ``below`` in sorted keys, int64 ``(below,)``.

    ``bincount`` would wait for the device to get its output's size, and ``scatter_add`` has atomics on few addresses.
    """
    ends = torch.searchsorted(keys, torch.arange(-1, below, dtype=keys.dtype, device=keys.device), right=True)
    return torch.diff(ends)


def _split_order(order: torch.Tensor, bounds: list[int]) -> list[torch.Tensor]:
    """Split a permutation at ``bounds``; each part starts at 0."""
    return [order[a:b] - a if a else order[a:b] for a, b in itertools.pairwise(bounds)]


def combine(output_RD: torch.Tensor, dispatched: Dispatched, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return expert outputs to the ranks of their tokens and sum them per token, weighted by the routing weights.

    The token's own rank applies the weights, after the down projection and in slot order, as transformers does. So the
    result equals the unsharded model's, and the router's gradient never leaves its rank.

    Args:
        output_RD: in the order of ``dispatched.rows_RD``; its ``D`` may differ from dispatch's.

    Returns:
        ``(T, D)`` in the promoted dtype of outputs and weights.
    """
    if dispatched.row_order is not None:
        output_RD = permute(output_RD, inverse(dispatched.row_order))
        output_RD = exchange_rows(output_RD, dispatched.all_to_all.reversed())
    slots_SD = permute(output_RD, inverse(dispatched.slot_order))
    tokens, k = weights_TK.shape
    return (slots_SD.view(tokens, k, slots_SD.shape[-1]) * weights_TK.unsqueeze(-1)).sum(dim=1)


def to_slots(hidden_TD: torch.Tensor, slot_order: torch.Tensor, k: int, backend: Backend = TORCH) -> torch.Tensor:
    """Gather the hidden state of every slot, ``(T * K, D)``, in the order in which slots are sent."""
    return _TokensToSlots.apply(hidden_TD, slot_order, k, backend)


def permute(x: torch.Tensor, order: torch.Tensor, backend: Backend = TORCH) -> torch.Tensor:
    """Return ``x[order]`` for a permutation; its gradient is a permutation too."""
    return _Permute.apply(x, order, backend)


def slot_weights(weights_TK: torch.Tensor) -> torch.Tensor:
    """Return the routing weights that are sent with the slots: ``(T * K,)``, float32 at least."""
    return weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32)).reshape(-1)


def weighted_combine(
    output_SD: torch.Tensor, plan: DispatchPlan, weights_TK: torch.Tensor, backend: Backend = TORCH
) -> torch.Tensor:
    """Sum expert outputs, in the order in which their slots were sent, per token and weighted by its routing weights.

    It saves no outputs. Its backward returns the *unweighted* gradient of each slot's output, and no gradient for the
    weights: the node that computed the outputs scales the first and computes the second (``deferred_router_grad``).
    """
    return _WeightedCombine.apply(output_SD, plan.slot_order, weights_TK, backend)


def deferred_router_grad(output_RD: torch.Tensor, scale_R: torch.Tensor) -> torch.Tensor:
    """Return ``output_RD`` unchanged; its backward expects the gradient of ``output_RD * scale_R``.

    The other half of ``weighted_combine``, for outputs of any code. It saves the outputs for the gradient of the
    routing weights; ``fused.on_rows`` does the same without.
    """
    return _DeferredRouterGrad.apply(output_RD, scale_R)


class _TokensToSlots(torch.autograd.Function):
    """Its gradient is a sum over K without atomics, so it is deterministic."""

    @staticmethod
    def forward(ctx, hidden_TD, order, k, backend):
        ctx.save_for_backward(order)
        ctx.slots, ctx.backend = (hidden_TD.shape[0], k), backend
        return backend.take(hidden_TD, order // k)

    @staticmethod
    def backward(ctx, grad_SD):
        (order,) = ctx.saved_tensors
        slots_TK = inverse(order).view(ctx.slots)
        return ctx.backend.gather_sum(grad_SD.contiguous(), slots_TK, None, grad_SD.dtype), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, backend):
        ctx.save_for_backward(order)
        ctx.backend = backend
        return backend.take(x, order)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return ctx.backend.take(grad.contiguous(), inverse(order)), None, None


class _WeightedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output_SD, order, weights_TK, backend):
        ctx.save_for_backward(order)
        ctx.dtype, ctx.k, ctx.backend = output_SD.dtype, weights_TK.shape[1], backend
        dtype = torch.promote_types(output_SD.dtype, weights_TK.dtype)
        return backend.gather_sum(output_SD, inverse(order).view_as(weights_TK), weights_TK, dtype)

    @staticmethod
    def backward(ctx, grad_TD):
        (order,) = ctx.saved_tensors
        return ctx.backend.take(grad_TD.to(ctx.dtype).contiguous(), order // ctx.k), None, None, None


class _DeferredRouterGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output_RD, scale_R):
        ctx.save_for_backward(output_RD, scale_R)
        return output_RD.view_as(output_RD)

    @staticmethod
    def backward(ctx, grad_RD):
        output_RD, scale_R = ctx.saved_tensors
        scaled = (grad_RD * scale_R.unsqueeze(-1)).to(grad_RD.dtype)
        return scaled, (grad_RD.to(scale_R.dtype) * output_RD).sum(-1)
