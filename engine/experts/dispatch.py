"""Send each token to the ranks that hold its experts, and bring the results back.

Shapes: ``T`` tokens, ``K`` experts per token, ``D`` hidden, ``E`` experts, ``e = E / ep`` experts on this rank, ``R``
rows received. A *slot* is one (token, expert) pair; there are ``T * K``.

Slots are sorted by global expert, hence by destination rank. What arrives is rank-major and is put in expert-major
order, so that one grouped GEMM reads it. Nothing here depends on the data but sizes: a rank without tokens, an expert
without rows and a token that lists one expert twice run the same collectives in the same order.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Dispatched", "combine", "dispatch"]


@dataclass(frozen=True)
class Dispatched:
    """What ``combine`` needs to undo one dispatch; made by ``dispatch``, never changed."""

    rows_RD: torch.Tensor
    """Received rows, grouped by local expert."""
    counts_e: torch.Tensor
    """int64 ``(e,)``: rows of each local expert."""
    slot_order: torch.Tensor
    """int64 ``(T * K,)``: slots in the order they were sent."""
    row_order: torch.Tensor | None
    """int64 ``(R,)``: received rows in expert order; ``None`` where they arrive in it (``ep == 1``)."""
    send_splits: list[int]
    recv_splits: list[int]


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
    slots = experts_TK.reshape(-1).long()
    slot_order = torch.argsort(slots, stable=True)
    # Not bincount: on an accelerator it waits for the device to learn its output's size.
    counts_E = slots.new_zeros(num_experts).scatter_add_(0, slots, torch.ones_like(slots))
    sent_SD = _TokensToSlots.apply(hidden_TD, slot_order, experts_TK.shape[-1])
    if group is None:
        return Dispatched(sent_SD, counts_E, slot_order, None, [], [])

    ep = dist.get_world_size(group)
    arriving = torch.empty_like(counts_E)
    dist.all_to_all_single(arriving, counts_E, group=group)
    arriving = arriving.view(ep, num_experts // ep)  # [source rank, local expert]
    # One host sync: the sizes of both directions.
    send_splits, recv_splits = torch.stack([counts_E.view(ep, -1).sum(1), arriving.sum(1)]).tolist()

    received_RD = _AllToAll.apply(sent_SD, recv_splits, send_splits, group)
    local_expert = torch.arange(num_experts // ep, device=slots.device).repeat(ep)
    row_expert = torch.repeat_interleave(local_expert, arriving.reshape(-1), output_size=sum(recv_splits))
    row_order = torch.argsort(row_expert, stable=True)
    rows_RD = _Permute.apply(received_RD, row_order)
    return Dispatched(rows_RD, arriving.sum(0), slot_order, row_order, send_splits, recv_splits)


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
        output_RD = _Permute.apply(output_RD, _inverse(sent.row_order))
        output_RD = _AllToAll.apply(output_RD, sent.send_splits, sent.recv_splits, group)
    slots_SD = _Permute.apply(output_RD, _inverse(sent.slot_order))
    tokens, k = weights_TK.shape
    return (slots_SD.view(tokens, k, slots_SD.shape[-1]) * weights_TK.unsqueeze(-1)).sum(dim=1)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


class _TokensToSlots(torch.autograd.Function):
    """``hidden[order // K]``; its gradient is a sum over K without atomics, so it is deterministic."""

    @staticmethod
    def forward(ctx, hidden_TD, order, k):
        ctx.save_for_backward(order)
        ctx.shape = (hidden_TD.shape[0], k)
        return hidden_TD[order // k]

    @staticmethod
    def backward(ctx, grad_SD):
        (order,) = ctx.saved_tensors
        tokens, k = ctx.shape
        by_slot = torch.empty_like(grad_SD, memory_format=torch.contiguous_format)
        by_slot[order] = grad_SD
        return by_slot.view(tokens, k, grad_SD.shape[-1]).sum(dim=1), None, None


class _Permute(torch.autograd.Function):
    """``x[order]`` for a permutation; the gradient is the inverse permutation, not a scatter-add."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        out[order] = grad
        return out, None


class _AllToAll(torch.autograd.Function):
    """``all_to_all_single`` of rows; the gradient goes the other way."""

    @staticmethod
    def forward(ctx, x, recv_splits, send_splits, group):
        ctx.route = (recv_splits, send_splits, group)
        return _all_to_all(x, recv_splits, send_splits, group)

    @staticmethod
    def backward(ctx, grad):
        recv_splits, send_splits, group = ctx.route
        return _all_to_all(grad, send_splits, recv_splits, group), None, None, None


def _all_to_all(x, recv_splits, send_splits, group):
    out = x.new_empty(sum(recv_splits), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), recv_splits, send_splits, group=group)
    return out
