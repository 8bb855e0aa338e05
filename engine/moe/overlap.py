"""Have rows travel while something computes.

    forward    D0 ----> D1 ----> ... | shared experts | compute 0 | compute 1 | ...
                                                       C0 ------>  C1 ------>        D: dispatch, C: combine, in flight
    backward   the same from right to left, every all-to-all in the other direction

A layer's tokens are cut in chunks. All dispatches are launched before anything computes, and each is waited for by its
own chunk alone; a chunk's combine is launched as soon as it has computed. Autograd runs the nodes of a graph latest
first, so backward launches every combine's gradient, then computes the chunks from the last to the first and launches
each dispatch's gradient behind it. What is launched, and in which order, depends on the settings alone.

Rows are scaled by their routing weights and summed at home, as in ``dispatch.combine``, but what comes back from the
experts is not kept there for the weights' gradient. The weights travel with the rows instead, and the gradient of the
sum goes to the experts as it is: they have by then computed what it takes (``fused.py``), and send the weights'
gradient home with that of the rows. That is 8 bytes of each row's way, and no memory.

Waiting is what makes the tensors safe: a flight keeps what is sent and what is received until then, and the stream that
waits is the one that allocated both and uses them next.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..errors import SettingError
from .dispatch import AllToAll, build_dispatch_plans, inverse, permute, slot_weights, to_slots, weighted_combine
from .find import CustomExperts, ExpertsInfo
from .gemm.backends import TORCH, Backend
from .shared_experts import SharedExperts, no_overlap_error, runs_shared_first, shared_experts_of

__all__ = ["check_overlap", "exchange"]


def check_overlap(chunks: int, shared: bool, dispatcher: str, model: nn.Module, experts: Sequence[ExpertsInfo]) -> None:
    """
    Raises:
        SettingError: experts that compute themselves also dispatch themselves; a block has no shared experts, or asks
            for them before the experts.
    """
    asked: dict[str, object] = {"dispatch_chunks": chunks} if chunks > 1 else {}
    asked |= {"overlap_shared_experts": shared} if shared else {}
    asked |= {"dispatcher": dispatcher} if dispatcher != "all_to_all" else {}
    for info in experts if asked else ():
        if isinstance(info.module, CustomExperts):
            name, value = next(iter(asked.items()))
            rule = f"{type(info.module).__name__} dispatches its tokens itself."
            raise SettingError(f"engine.{name}", value, rule, "leave it at its default")
        block = model.get_submodule(info.fqn.rpartition(".")[0])
        if shared and not shared_experts_of(block, info.module):
            raise no_overlap_error(f"there are no shared experts beside {info.fqn}")
        if shared and runs_shared_first(block, info.module):
            raise no_overlap_error(f"{type(block).__name__} asks for its shared experts before the experts")


def exchange(
    hidden_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    *,
    num_experts: int,
    group: dist.ProcessGroup,
    backend: Backend = TORCH,
    chunks: int = 1,
    shared: SharedExperts | None = None,
) -> torch.Tensor:
    """Dispatch, compute and combine with as little waiting and as little memory as can be.

    Args:
        hidden_TD: ``(T, D)``; ``T`` may be 0, and differ among ranks.
        experts_TK: global expert ids ``(T, K)``.
        weights_TK: routing weights ``(T, K)``.
        compute: from rows grouped by local expert ``(R, D)``, their numbers ``(e,)`` and their routing weights ``(R,)``
            (``None`` where gradients are not enabled) to outputs ``(R, D)``, *not* scaled by the weights; the gradient
            that it gets is that of the scaled outputs (``dispatch.deferred_router_grad``). Called once for each chunk, some
            of which may have no row.
        num_experts: ``E``.
        backend: moves and sums rows.
        chunks: parts in which tokens are dispatched.
        shared: the shared experts that are computed beside the dispatch, if any.

    Returns:
        ``(T, D)``: as ``combine``'s.
    """
    k = experts_TK.shape[-1]
    routes = build_dispatch_plans(experts_TK, num_experts, group, chunks)
    sizes = [route.slot_order.numel() // k for route in routes]
    weights = weights_TK.split(sizes)
    leaving = []
    for hidden_tD, weights_tK, route in zip(hidden_TD.split(sizes), weights, routes, strict=True):
        rows = [to_slots(hidden_tD, route, k, backend)]
        if torch.is_grad_enabled():
            rows.append(permute(slot_weights(weights_tK), route.slot_order))
        leaving.append(_AsyncAllToAll.launched(rows, route.travel))
    if shared is not None:
        shared.compute_ahead()
    returning = []
    for flight, route in zip(leaving, routes, strict=True):
        assert route.row_order is not None
        received_RD, *scale_R = flight.landed()
        rows_RD = permute(received_RD, route.row_order, backend)
        del received_RD
        out_RD = compute(rows_RD, route.counts_e, permute(scale_R[0], route.row_order) if scale_R else None)
        out_RD = permute(out_RD, inverse(route.row_order), backend)
        returning.append(_AsyncAllToAll.launched([out_RD], route.all_to_all.reversed()))
    outputs = [
        weighted_combine(flight.landed()[0], route, weights_tK, backend)
        for flight, route, weights_tK in zip(returning, routes, weights, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _AsyncAllToAll:
    """All-to-alls of rows under way in forward, and later those of their gradients."""

    def __init__(self, travel: AllToAll):
        self.travel = travel
        self.pending: tuple[torch.Tensor, ...] = ()
        self.under_way: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []

    @classmethod
    def launched(cls, rows: Sequence[torch.Tensor], travel: AllToAll) -> "_AsyncAllToAll":
        """Of tensors that have a row for each slot."""
        flight = cls(travel)
        flight.pending = _Start.apply(flight, *rows)
        return flight

    def landed(self) -> tuple[torch.Tensor, ...]:
        pending, self.pending = self.pending, ()
        return _Wait.apply(self, *pending)

    def start(self, rows: Sequence[torch.Tensor], travel: AllToAll) -> tuple[torch.Tensor, ...]:
        splits = travel.recv_splits, travel.send_splits
        for x in rows:
            x, out = x.contiguous(), travel.empty_output(x)
            work = dist.all_to_all_single(out, x, *splits, group=travel.group, async_op=True)
            self.under_way.append((work, x, out))
        return tuple(out for _, _, out in self.under_way)

    def wait(self) -> tuple[torch.Tensor, ...]:
        under_way, self.under_way = self.under_way, []
        for work, _, _ in under_way:
            work.wait()
        return tuple(out for _, _, out in under_way)


class _Start(torch.autograd.Function):
    """Rows set off: what is returned may be read after ``_Wait`` alone. Their gradient arrives."""

    @staticmethod
    def forward(ctx, flight, *rows):
        ctx.flight = flight
        return flight.start(rows, flight.travel)

    @staticmethod
    def backward(ctx, *_):
        return None, *ctx.flight.wait()


class _Wait(torch.autograd.Function):
    """Rows have arrived; their gradient sets off. It has the wrong shape for what is returned, so the flight has it."""

    @staticmethod
    def forward(ctx, flight, *rows):
        ctx.flight = flight
        flight.wait()
        return tuple(x.view_as(x) for x in rows)

    @staticmethod
    def backward(ctx, *grads):
        ctx.flight.start(grads, ctx.flight.all_to_all.reversed())
        return None, *grads
