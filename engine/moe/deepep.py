"""Dispatch with DeepEP's kernels (https://github.com/deepseek-ai/DeepEP), where they are installed.

DeepEP sends a token once to every rank that holds some of its experts, together with its routing weights. That rank
expands it to rows, computes their weighted sum in float32 and sends it back once; DeepEP adds up the returned sums. So
fewer rows are sent than by ``dispatch``, and the experts' ranks apply the weights, not the token's own.

The module only uses the documented ``get_dispatch_layout``, ``dispatch`` and ``combine`` of ``deep_ep.Buffer`` in
high-throughput mode. ``dispatch`` is the gradient of ``combine`` and vice versa.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SettingError
from .dispatch import count_sorted, sort_keys
from .gemm.backends import TORCH, Backend, inverse

__all__ = ["DISPATCHERS", "buffer_bytes", "buffer_of", "check_deepep", "exchange"]

DISPATCHERS = ("all_to_all", "deepep")
_COLUMNS = 256  # kernels copy units of 512 bytes


def check_deepep(device: str, ep: int, hidden: int, dtype: torch.dtype, full_determinism: bool = False) -> None:
    """Check that DeepEP is installed and can send rows of ``hidden`` columns; with a GPU, that it can be imported.

    Raises:
        SettingError: DeepEP can't be imported, or has no kernel for these rows or this number of ranks.
    """

    def refused(rule: str) -> SettingError:
        return SettingError("engine.dispatcher", "deepep", rule, "engine.dispatcher=all_to_all")

    if device != "cuda":
        raise refused(f"DeepEP is for NVIDIA GPUs, and the device is {device}.")
    if importlib.util.find_spec("deep_ep") is None:
        raise refused("deep_ep is not installed.")
    if full_determinism:
        raise refused("DeepEP refuses torch's deterministic algorithms, which engine.full_determinism=True sets.")
    if dtype != torch.bfloat16:
        raise refused(f"DeepEP sends rows in bfloat16, and they are computed in {dtype}.")
    if hidden % _COLUMNS:
        raise refused(f"DeepEP sends rows of a multiple of {_COLUMNS} columns, and the hidden size is {hidden}.")
    if torch.cuda.is_available():  # a driver without a GPU can't import it
        try:
            from deep_ep import Buffer
        except Exception as error:  # it asserts versions of NCCL and CUDA, and compiles
            raise refused(f"deep_ep can't be imported: {type(error).__name__}: {error}") from error
        try:
            Buffer.get_dispatch_config(ep)
        except AssertionError as error:
            raise refused(f"deep_ep has no configuration for engine.ep_size={ep}: {error}") from error


def buffer_bytes(ranks: int, row_bytes: int) -> tuple[int, int]:
    """Return the bytes that DeepEP allocates on a GPU for ranks of its node, and for ranks of other nodes.

    It allocates them outside of torch's allocator, by ``cudaMalloc`` and NVSHMEM (``csrc/deep_ep.cpp``, 1.2.1).
    """
    from deep_ep import Buffer

    configs = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
    inside = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
    return inside, max(config.get_rdma_buffer_size_hint(row_bytes, ranks) for config in configs)


@functools.cache
def buffer_of(group: dist.ProcessGroup, row_bytes: int) -> Any:
    """Return the ``deep_ep.Buffer`` of a group, one per group; collective over the group at its first call.

    The process keeps it to its end, also while vLLM is awake; the plan of a run names its size.
    """
    from deep_ep import Buffer

    return Buffer(group, *buffer_bytes(group.size(), row_bytes))


def exchange(
    hidden_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    *,
    num_experts: int,
    group: dist.ProcessGroup,
    backend: Backend = TORCH,
    buffer: Callable[[dist.ProcessGroup, int], Any] = buffer_of,
) -> torch.Tensor:
    """Dispatch, compute and combine as ``overlap.exchange``; returns ``(T, D)`` in the dtype of ``hidden_TD``."""
    deepep = buffer(group, hidden_TD.shape[1] * hidden_TD.element_size())
    arrived = _Dispatch.apply(hidden_TD.contiguous(), experts_TK.long(), weights_TK.float(), num_experts, deepep)
    tokens_ND, local_NK, weights_NK, counts, handle = arrived
    # Slots in expert order; -1, an expert on another rank, comes first.
    experts, absent = local_NK.reshape(-1), local_NK.numel() - sum(counts)
    keys, order = sort_keys(experts, len(counts))
    slots_R, rows_NK = order[absent:], inverse(order).view_as(local_NK) - absent
    # An expert on another rank is replaced by another row of the token, with a weight of zero.
    present_NK = local_NK >= 0
    rows_NK = torch.where(present_NK, rows_NK, rows_NK.amax(1, keepdim=True))
    counts_e = count_sorted(keys, len(counts))  # not torch.tensor(counts), which would wait for the device
    token_R = slots_R // experts_TK.shape[1]
    scale_R = weights_NK.reshape(-1).index_select(0, slots_R)
    rows_RD = _TokensToRows.apply(tokens_ND, token_R, rows_NK, present_NK, backend)
    out_RD = compute(rows_RD, counts_e, scale_R if torch.is_grad_enabled() else None)
    out_ND = _WeightedCombine.apply(out_RD, token_R, rows_NK, weights_NK * present_NK, backend)
    return _Combine.apply(out_ND, handle, deepep)


class _TokensToRows(torch.autograd.Function):
    """``tokens[token_R]``; its gradient is a sum over a token's rows without atomics, so it is deterministic."""

    @staticmethod
    def forward(ctx, tokens_ND, token_R, rows_NK, present_NK, backend):
        ctx.save_for_backward(rows_NK, present_NK)
        ctx.backend = backend
        return backend.take(tokens_ND, token_R)

    @staticmethod
    def backward(ctx, grad_RD):
        rows_NK, present_NK = ctx.saved_tensors
        dtype = grad_RD.dtype
        grad_ND = ctx.backend.gather_sum(grad_RD.contiguous(), rows_NK, present_NK.to(dtype), dtype)
        return grad_ND, None, None, None, None


class _WeightedCombine(torch.autograd.Function):
    """``dispatch.weighted_combine`` over the rows that a token has on this rank, ``(N, D)``; sums in float32."""

    @staticmethod
    def forward(ctx, out_RD, token_R, rows_NK, weights_NK, backend):
        ctx.save_for_backward(token_R)
        ctx.backend = backend
        return backend.gather_sum(out_RD.contiguous(), rows_NK, weights_NK, out_RD.dtype)

    @staticmethod
    def backward(ctx, grad_ND):
        (token_R,) = ctx.saved_tensors
        return ctx.backend.take(grad_ND.contiguous(), token_R), None, None, None, None


class _Dispatch(torch.autograd.Function):
    """Returns received tokens ``(N, D)``, their local experts ``(N, K)`` or -1, their weights, rows per expert."""

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
