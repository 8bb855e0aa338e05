"""Overlap the all-to-alls of rows with compute.

    forward    D0 ----> D1 ----> ... | shared experts | compute 0 | compute 1 | ...
                                                       C0 ------>  C1 ------>        D: dispatch, C: combine, async
    backward   the same from right to left, every all-to-all in the other direction

A layer's tokens are split into chunks. All dispatches start before anything computes, and only a chunk's own compute
waits for its dispatch. A chunk's combine starts as soon as the chunk is computed. Autograd runs the latest nodes of a
graph first. So backward starts the gradient of every combine, then computes the chunks from the last to the first. It
starts the gradient of each dispatch after its chunk. The order of collectives depends on the settings alone.

The source rank applies the routing weights after combine, as in ``dispatch.combine``, but saves no expert outputs for
the weights' gradient. Each row is sent with its weight instead, and backward sends the unweighted output gradient to
the experts. They return the gradient of the row and of its weight (``fused.py``). That costs 8 bytes per row on the
wire and no memory.

An ``_AsyncAllToAll`` keeps the sent and received tensors until its wait. That makes them safe without
``record_stream``: the stream that waits is the one that allocated both and uses them next.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..errors import SettingError
from .chunks import DispatchSizes
from .collectives.rows import RowExchange, Started
from .dispatch import permute, slot_weights, start_dispatch_plans, to_slots, weighted_combine
from .find import CustomExperts, ExpertsInfo
from .gemm.backends import TORCH, Backend, inverse
from .shared_experts import SharedExperts, no_overlap_error, shared_experts_of

__all__ = ["check_overlap", "exchange"]


def check_overlap(
    chunks: int, shared: bool | None, dispatcher: str, model: nn.Module, experts: Sequence[ExpertsInfo]
) -> None:
    """Check that the settings of dispatch suit the model; ``chunks=-1`` and ``shared=None`` suit every model.

    Raises:
        SettingError: custom experts, which dispatch their tokens themselves, would ignore a setting. Or a block has no
            shared experts, or calls them before the experts or with another tensor than its input.
    """
    settings: list[tuple[str, object, bool]] = [
        ("engine.dispatch_chunks", chunks, chunks > 1),
        ("engine.overlap_shared_experts", shared, bool(shared)),
        ("engine.dispatcher", dispatcher, dispatcher != "all_to_all"),
    ]
    changed = [(name, value) for name, value, is_changed in settings if is_changed]
    for info in experts if changed else ():
        if isinstance(info.module, CustomExperts):
            rule = f"{type(info.module).__name__} dispatches its tokens itself."
            raise SettingError(*changed[0], rule, "leave it at its default")
        block = model.get_submodule(info.block)
        if shared and not shared_experts_of(block, info.module):
            raise no_overlap_error(f"there are no shared experts beside {info.fqn}")
        sizes = DispatchSizes.of_layer(model, info, torch.float32) if shared else None
        if sizes is not None and not sizes.shared:
            why = "calls its shared experts before the experts, or with another tensor than its input"
            raise no_overlap_error(f"{type(block).__name__} {why}")


def exchange(
    hidden_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    compute: Callable[..., torch.Tensor],
    *,
    num_experts: int,
    group: dist.ProcessGroup,
    etp_group: dist.ProcessGroup | None = None,
    backend: Backend = TORCH,
    chunks: int = 1,
    shared: SharedExperts | None = None,
) -> torch.Tensor:
    """Dispatch, compute and combine; all-to-alls overlap with compute, and no expert outputs are saved.

    Args:
        hidden_TD: ``T`` may be 0, and differ among ranks.
        compute: maps rows grouped by local expert ``(R, D)``, their counts ``(e,)`` and their routing weights ``(R,)``
            (``None`` without gradients) to *unweighted* outputs ``(R, D)``. Its backward gets the gradient of the
            weighted outputs (``dispatch.deferred_router_grad``). Called once per chunk, also for empty chunks. If
            ``backend`` reads rows through an index, rows and outputs keep the order of arrival, and a fourth argument
            is the order that groups them.
        etp_group: the ranks that share each expert. They gather before a chunk computes and reduce-scatter after it.
        shared: the shared experts to compute while tokens are dispatched, if any.

    Returns:
        ``(T, D)``, as ``combine`` returns it.
    """
    k = experts_TK.shape[-1]
    planned = start_dispatch_plans(experts_TK, num_experts, group, chunks, etp_group)
    sizes = [order.numel() // k for order in planned.slot_orders]
    weights = weights_TK.split(sizes)
    rows: list[list[torch.Tensor]] = []  # of each chunk
    for hidden_tD, weights_tK, order in zip(hidden_TD.split(sizes), weights, planned.slot_orders, strict=True):
        rows.append([to_slots(hidden_tD, order, k, backend)])
        if torch.is_grad_enabled():
            rows[-1].append(permute(slot_weights(weights_tK), order))
    plans = planned.wait()
    dispatches = [_AsyncAllToAll(rows.pop(0), plan.all_to_all) for plan in plans]
    if shared is not None:
        shared.compute_ahead()
    combines = []
    for pending, plan in zip(dispatches, plans, strict=True):
        assert plan.row_order is not None
        rows_RD, *scale_R = pending.wait()
        if backend.reads_index:
            out_RD = compute(rows_RD, plan.counts_e, scale_R[0] if scale_R else None, plan.row_order)
        else:
            rows_RD = permute(rows_RD, plan.row_order, backend)
            out_RD = compute(rows_RD, plan.counts_e, permute(scale_R[0], plan.row_order) if scale_R else None)
            out_RD = permute(out_RD, inverse(plan.row_order), backend)
        combines.append(_AsyncAllToAll([out_RD], plan.all_to_all.reversed()))
    outputs = [
        weighted_combine(pending.wait()[0], plan, weights_tK, backend)
        for pending, plan, weights_tK in zip(combines, plans, weights, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _AsyncAllToAll:
    """All-to-alls of several tensors, one row per slot: one autograd node starts them, another waits for them."""

    def __init__(self, rows: Sequence[torch.Tensor], all_to_all: RowExchange):
        self.all_to_all = all_to_all
        self.started: list[Started] = []
        self.outputs: tuple[torch.Tensor, ...] = _Start.apply(self, *rows)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait for the received rows of each tensor."""
        outputs, self.outputs = self.outputs, ()
        return _Wait.apply(self, *outputs)

    def issue(self, rows: Sequence[torch.Tensor], all_to_all: RowExchange) -> tuple[torch.Tensor, ...]:
        """Issue the collectives, outside of autograd; the outputs are undefined before ``finish``."""
        self.started = [all_to_all.start(x) for x in rows]
        return tuple(started.out for started in self.started)

    def finish(self) -> tuple[torch.Tensor, ...]:
        pending, self.started = self.started, []
        for started in pending:
            started.finish()
        return tuple(started.out for started in pending)


class _Start(torch.autograd.Function):
    """Starts in forward; only ``_Wait`` may read its outputs. Waits for the gradient in backward."""

    @staticmethod
    def forward(ctx, pending, *rows):
        ctx.pending = pending
        return pending.issue(rows, pending.all_to_all)

    @staticmethod
    def backward(ctx, *_):
        return None, *ctx.pending.finish()


class _Wait(torch.autograd.Function):
    """Waits in forward; in backward starts the reverse all-to-all.

    Backward returns its own input, because autograd requires a gradient of the input's shape, which the output of the
    reverse all-to-all has not. ``_Start.backward`` gets that output from ``_AsyncAllToAll``.
    """

    @staticmethod
    def forward(ctx, pending, *rows):
        ctx.pending = pending
        pending.finish()
        return tuple(x.view_as(x) for x in rows)

    @staticmethod
    def backward(ctx, *grads):
        ctx.pending.issue(grads, ctx.pending.all_to_all.reversed())
        return None, *grads
