"""Dispatch with DeepEP's kernels (https://github.com/deepseek-ai/DeepEP), where they are installed.

A token is sent once to every rank that holds some of its experts, together with its routing weights. That rank makes
the rows of each expert and returns their weighted sum once; DeepEP adds up what the ranks return. Fewer rows are sent
than by ``dispatch``, and the weights are applied on the experts' ranks, in float32, rather than on the token's own.

It only uses the documented ``get_dispatch_layout``, ``dispatch`` and ``combine`` of ``deep_ep.Buffer`` in
high-throughput mode; each of the latter two is the other's gradient.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SettingError

__all__ = ["DISPATCHERS", "buffer_of", "check_deepep", "exchange"]

DISPATCHERS = ("all_to_all", "deepep")
# deep_ep/buffer.py has a configuration for these; kernels copy units of 512 bytes.
_RANKS, _COLUMNS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160), 256


def check_deepep(device: str, ep: int, hidden: int, dtype: torch.dtype) -> None:
    """Check that DeepEP is installed and can send such rows.

    Args:
        device: verl's device name.
        ep: expert-parallel size.
        hidden: columns of a row.
        dtype: that rows are sent in.

    Raises:
        SettingError: DeepEP is not installed, or has no kernel for these rows or this number of ranks.
    """

    def refused(rule: str) -> SettingError:
        return SettingError("engine.dispatcher", "deepep", rule, "engine.dispatcher=all_to_all")

    if device != "cuda":
        raise refused(f"DeepEP is for NVIDIA GPUs, and the device is {device}.")
    if importlib.util.find_spec("deep_ep") is None:
        raise refused("deep_ep is not installed.")
    if ep not in _RANKS:
        raise refused(f"DeepEP has kernels for {', '.join(map(str, _RANKS))} ranks, and engine.ep_size={ep}.")
    if dtype != torch.bfloat16:
        raise refused(f"DeepEP sends rows in bfloat16, and they are computed in {dtype}.")
    if hidden % _COLUMNS:
        raise refused(f"DeepEP sends rows of a multiple of {_COLUMNS} columns, and the hidden size is {hidden}.")


@functools.cache
def buffer_of(group: dist.ProcessGroup, row_bytes: int) -> Any:
    """Return the ``deep_ep.Buffer`` of a group, one per group; collective over the group at its first call."""
    from deep_ep import Buffer

    ranks = group.size()
    configs = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
    inside = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
    between = max(config.get_rdma_buffer_size_hint(row_bytes, ranks) for config in configs)
    return Buffer(group, inside, between)


def exchange(
    hidden_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    *,
    num_experts: int,
    group: dist.ProcessGroup,
    buffer: Callable[[dist.ProcessGroup, int], Any] = buffer_of,
) -> torch.Tensor:
    """Do what ``overlap.exchange`` does with DeepEP; returns ``(T, D)`` in the dtype of ``hidden_TD``."""
    deepep = buffer(group, hidden_TD.shape[1] * hidden_TD.element_size())
    arrived = _Dispatch.apply(hidden_TD.contiguous(), experts_TK.long(), weights_TK.float(), num_experts, deepep)
    tokens_ND, local_NK, weights_NK, counts, handle = arrived
    # Slots in expert order; -1, an expert on another rank, comes first.
    experts = local_NK.reshape(-1)
    slots_R = torch.argsort(experts, stable=True)[experts.numel() - sum(counts) :]
    token_R = slots_R // experts_TK.shape[1]
    counts_e = torch.tensor(counts, device=experts.device)
    scale_R = weights_NK.reshape(-1).index_select(0, slots_R)
    out_RD = compute(tokens_ND.index_select(0, token_R), counts_e, scale_R if torch.is_grad_enabled() else None)
    out_ND = _WeightedCombine.apply(out_RD, token_R, scale_R, tokens_ND.shape[0])
    return _Combine.apply(out_ND, handle, deepep)


class _WeightedCombine(torch.autograd.Function):
    """``dispatch.weighted_combine`` over the rows that a token has on this rank, ``(N, D)``; sums in float32."""

    @staticmethod
    def forward(ctx, out_RD, token_R, scale_R, tokens):
        ctx.save_for_backward(token_R)
        total = out_RD.new_zeros(tokens, out_RD.shape[1], dtype=scale_R.dtype)
        return total.index_add_(0, token_R, out_RD * scale_R.unsqueeze(1)).to(out_RD.dtype)

    @staticmethod
    def backward(ctx, grad_ND):
        (token_R,) = ctx.saved_tensors
        return grad_ND.index_select(0, token_R), None, None, None


class _Dispatch(torch.autograd.Function):
    """Returns received tokens ``(N, D)``, their local experts ``(N, K)`` or -1, their weights, and rows per expert."""

    @staticmethod
    def forward(ctx, hidden, experts, weights, num_experts, buffer):
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(experts, num_experts)
        tokens, local, weights, counts, handle, _ = buffer.dispatch(
            hidden,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=experts,
            topk_weights=weights,
        )
        ctx.handle, ctx.buffer = handle, buffer
        ctx.mark_non_differentiable(local)
        return tokens, local, weights, counts, handle

    @staticmethod
    def backward(ctx, grad_tokens, _local, grad_weights, _counts, _handle):
        hidden, weights, _ = ctx.buffer.combine(grad_tokens.contiguous(), ctx.handle, topk_weights=grad_weights)
        return hidden, None, weights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, handle, buffer):
        ctx.handle, ctx.buffer = handle, buffer
        return buffer.combine(out, handle)[0]

    @staticmethod
    def backward(ctx, grad):
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None
