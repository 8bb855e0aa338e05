"""Send each token to the ranks that hold its experts, and bring the results back.

Shapes: ``T`` tokens, ``K`` experts per token, ``D`` hidden, ``E`` experts, ``e = E / ep`` experts on this rank, ``R``
rows received. A *slot* is one (token, expert) pair; there are ``T * K``.

Slots are sorted by global expert, hence by destination rank. What arrives is rank-major and is put in expert-major
order, so that one grouped GEMM reads it. Nothing here depends on the data but sizes: a rank without tokens, an expert
without rows and a token that lists one expert twice run the same collectives in the same order.

``dispatch`` and ``combine`` are the plain pair. ``fused.on_tokens`` and ``overlap.exchange`` are made of the same
pieces and keep less.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .gemm.backends import TORCH, Backend

__all__ = [
    "Dispatched",
    "DispatchPlan",
    "AllToAll",
    "chunk_bounds",
    "combine",
    "dispatch",
    "inverse",
    "slot_weights",
    "permute",
    "build_dispatch_plans",
    "deferred_router_grad",
    "weighted_combine",
    "to_slots",
]


@dataclass(frozen=True)
class AllToAll:
    """The all-to-all of a route, from the ranks of tokens to those of their experts; without a group, nowhere."""

    send_splits: list[int]
    recv_splits: list[int]
    group: dist.ProcessGroup | None

    @property
    def reversed(self) -> "AllToAll":
        """The way home."""
        return AllToAll(self.recv_splits, self.send_splits, self.group)

    def __call__(self, x_S: torch.Tensor) -> torch.Tensor:
        """What slots have, by the first dim, to their experts' ranks: ``(S, ...)`` to ``(R, ...)``."""
        if self.group is None:
            return x_S
        out = self.empty_output(x_S)
        dist.all_to_all_single(out, x_S.contiguous(), self.recv_splits, self.send_splits, group=self.group)
        return out

    def empty_output(self, x_S: torch.Tensor) -> torch.Tensor:
        """For what arrives."""
        return x_S.new_empty(sum(self.recv_splits), *x_S.shape[1:])


@dataclass(frozen=True)
class DispatchPlan:
    """How the slots of some tokens travel to their experts, and back; made by ``build_dispatch_plans``, never changed."""

    counts_e: torch.Tensor
    """int64 ``(e,)``: rows of each local expert."""
    slot_order: torch.Tensor
    """int64 ``(T * K,)``: slots in the order they were sent."""
    row_order: torch.Tensor | None
    """int64 ``(R,)``: received rows in expert order; ``None`` where they arrive in it (``ep == 1``)."""
    travel: AllToAll

    @property
    def rows(self) -> int:
        """``R``."""
        return self.slot_order.numel() if self.row_order is None else self.row_order.numel()


@dataclass(frozen=True)
class Dispatched(DispatchPlan):
    """What ``combine`` needs to undo one dispatch; made by ``dispatch``, never changed."""

    rows_RD: torch.Tensor
    """Received rows, grouped by local expert."""


def dispatch(
    hidden_TD: torch.Tensor, experts_TK: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None
) -> Dispatched:
    """Bring every slot's hidden state to the rank of its expert.

    Args:
        hidden_TD: hidden states ``(T, D)``; gradients flow through.
        experts_TK: global expert ids ``(T, K)``, any integer dtype; read only.
        num_experts: ``E``.
        group: the EP group, ``None`` where one rank holds all experts.
    """
    (route,) = build_dispatch_plans(experts_TK, num_experts, group)
    sent_SD = to_slots(hidden_TD, route, experts_TK.shape[-1])
    if group is None:
        return Dispatched(**vars(route), rows_RD=sent_SD)
    assert route.row_order is not None
    received_RD = _AllToAll.apply(sent_SD, route.travel)
    return Dispatched(**vars(route), rows_RD=permute(received_RD, route.row_order))


def chunk_bounds(tokens: int, chunks: int) -> list[int]:
    """Where each chunk of tokens begins, and the last ends; chunks differ by one token at most, and may be empty."""
    return [-(-i * tokens // chunks) for i in range(chunks + 1)]


def build_dispatch_plans(
    experts_TK: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None, chunks: int = 1
) -> list[DispatchPlan]:
    """The routes of each chunk of tokens: one all-to-all and one host sync for all of them.

    Args:
        experts_TK: global expert ids ``(T, K)``, any integer dtype; read only.
        num_experts: ``E``.
        chunks: parts of the ``T`` tokens (``bounds``), as many on all ranks of the group.
    """
    (tokens, k), e = experts_TK.shape, num_experts
    keys = experts_TK.long()
    if chunks > 1:  # by chunk, then by expert
        keys = keys + (torch.arange(tokens, device=keys.device) * chunks // max(tokens, 1) * e).unsqueeze(1)
    keys = keys.reshape(-1)
    slot_orders = _relative(torch.argsort(keys, stable=True), [k * b for b in chunk_bounds(tokens, chunks)])
    # Not bincount: on an accelerator it waits for the device to learn its output's size.
    counts = keys.new_zeros(chunks * e).scatter_add_(0, keys, torch.ones_like(keys))
    if group is None:
        nowhere = AllToAll([], [], None)
        return [DispatchPlan(c, order, None, nowhere) for c, order in zip(counts.split(e), slot_orders, strict=True)]

    ep = dist.get_world_size(group)
    e //= ep
    leaving = counts.view(chunks, ep, e).transpose(0, 1).contiguous()  # [destination rank, chunk, local expert]
    arriving = torch.empty_like(leaving)  # [source rank, chunk, local expert]
    dist.all_to_all_single(arriving, leaving, group=group)
    # One host sync: the sizes of both directions, of each chunk.
    send_splits, recv_splits = torch.stack([leaving.sum(2), arriving.sum(2)]).transpose(1, 2).tolist()

    received = [0, *itertools.accumulate(sum(splits) for splits in recv_splits)]
    local_expert = torch.arange(chunks * e, device=keys.device).view(chunks, 1, e).expand(chunks, ep, e).reshape(-1)
    sizes = arriving.transpose(0, 1).reshape(-1)
    row_expert = torch.repeat_interleave(local_expert, sizes, output_size=received[-1])
    row_orders = _relative(torch.argsort(row_expert, stable=True), received)
    counts_e = arriving.sum(0).unbind()
    travels = [AllToAll(send, recv, group) for send, recv in zip(send_splits, recv_splits, strict=True)]
    return [DispatchPlan(*route) for route in zip(counts_e, slot_orders, row_orders, travels, strict=True)]


def _relative(order: torch.Tensor, edges: list[int]) -> list[torch.Tensor]:
    """The part of an order between two bounds each, counted from the first of them."""
    return [order[a:b] - a if a else order[a:b] for a, b in itertools.pairwise(edges)]


def combine(
    output_RD: torch.Tensor, sent: Dispatched, weights_TK: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Bring expert outputs home and sum them per token with the routing weights.

    The weights are applied here, on the token's own rank, after the down projection and in slot order, as transformers
    does: the result is the one of the unsharded model, and the router's gradient never leaves its rank.

    Args:
        output_RD: expert outputs in the order of ``sent.rows_RD``; its ``D`` may differ from dispatch's.
        weights_TK: routing weights ``(T, K)``.

    Returns:
        ``(T, D)`` in the dtype that the product has.
    """
    if group is not None:
        assert sent.row_order is not None
        output_RD = permute(output_RD, inverse(sent.row_order))
        output_RD = _AllToAll.apply(output_RD, sent.all_to_all.reversed())
    slots_SD = permute(output_RD, inverse(sent.slot_order))
    tokens, k = weights_TK.shape
    return (slots_SD.view(tokens, k, slots_SD.shape[-1]) * weights_TK.unsqueeze(-1)).sum(dim=1)


def to_slots(hidden_TD: torch.Tensor, route: DispatchPlan, k: int, backend: Backend = TORCH) -> torch.Tensor:
    """The hidden state of every slot, ``(T * K, D)``, in the order in which slots are sent."""
    return _TokensToSlots.apply(hidden_TD, route.slot_order, k, backend)


def permute(x: torch.Tensor, order: torch.Tensor, backend: Backend = TORCH) -> torch.Tensor:
    """``x[order]`` for a permutation."""
    return _Permute.apply(x, order, backend)


def slot_weights(weights_TK: torch.Tensor) -> torch.Tensor:
    """Routing weights as they travel with the slots: ``(T * K,)``, float32 at least."""
    return weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32)).reshape(-1)


def weighted_combine(
    output_SD: torch.Tensor, route: DispatchPlan, weights_TK: torch.Tensor, backend: Backend = TORCH
) -> torch.Tensor:
    """Sum expert outputs, in the order in which their slots were sent, per token and with its routing weights.

    Nothing is kept for it: its gradient, of each slot, is that of the slot's output *times its weight*, and there is
    none for the weights. Both are left to whom the outputs came from (``deferred_router_grad``).

    Returns:
        ``(T, D)`` in the dtype that the product has.
    """
    return _WeightedCombine.apply(output_SD, route.slot_order, weights_TK, backend)


def deferred_router_grad(output_RD: torch.Tensor, scale_R: torch.Tensor) -> torch.Tensor:
    """``output_RD``, which ``weighted_combine`` scales; its gradient is taken to be that of ``output_RD * scale_R``.

    The other half of ``weighted_combine``, for outputs of any code. It keeps the outputs; ``fused.on_rows`` need not.
    """
    return _DeferredRouterGrad.apply(output_RD, scale_R)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes ``order``."""
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return back


class _TokensToSlots(torch.autograd.Function):
    """``hidden[order // K]``; its gradient is a sum over K without atomics, so it is deterministic."""

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
    """``x[order]`` for a permutation; the gradient is the inverse permutation, not a scatter-add."""

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


class _AllToAll(torch.autograd.Function):
    """A ``AllToAll``; the gradient comes back."""

    @staticmethod
    def forward(ctx, x, travel):
        ctx.travel = travel
        return travel(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.all_to_all.reversed()(grad), None
