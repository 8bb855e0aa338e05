"""Have rows travel while something computes.

    forward    D0 ----> D1 ----> ... | shared experts | compute 0 | compute 1 | ...
                                                       C0 ------>  C1 ------>        D: dispatch, C: combine, in flight
    backward   the same from right to left, every all-to-all in the other direction

A layer's tokens are cut in chunks. All dispatches are launched before anything computes, and each is waited for by its
own chunk alone; a chunk's combine is launched as soon as it has computed. Autograd runs the nodes of a graph latest
first, so backward launches every combine's gradient, then computes the chunks from the last to the first and launches
each dispatch's gradient behind it. What is launched, and in which order, depends on the settings alone.

Waiting is what makes the tensors safe: a flight keeps what is sent and what is received until then, and the stream that
waits is the one that allocated both and uses them next.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..errors import SettingError
from .dispatch import inverse, permute, plan, to_slots, weighted_sum
from .find import ComputesItself, ExpertsInfo
from .shared_experts import SharedExperts, asks_first, beside, nothing_overlaps

__all__ = ["check_exchange", "exchange"]


def check_exchange(
    chunks: int, shared: bool, dispatcher: str, model: nn.Module, experts: Sequence[ExpertsInfo]
) -> None:
    """
    Raises:
        SettingError: experts that compute themselves also dispatch themselves; a block has no shared experts, or asks
            for them before the experts.
    """
    asked: dict[str, object] = {"dispatch_chunks": chunks} if chunks > 1 else {}
    asked |= {"overlap_shared_experts": shared} if shared else {}
    asked |= {"dispatcher": dispatcher} if dispatcher != "all_to_all" else {}
    for info in experts if asked else ():
        if isinstance(info.module, ComputesItself):
            name, value = next(iter(asked.items()))
            rule = f"{type(info.module).__name__} dispatches its tokens itself."
            raise SettingError(f"engine.{name}", value, rule, "leave it at its default")
        block = model.get_submodule(info.fqn.rpartition(".")[0])
        if shared and not beside(block, info.module):
            raise nothing_overlaps(f"there are no shared experts beside {info.fqn}")
        if shared and asks_first(block, info.module):
            raise nothing_overlaps(f"{type(block).__name__} asks for its shared experts before the experts")


def exchange(
    hidden_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    num_experts: int,
    group: dist.ProcessGroup,
    chunks: int = 1,
    shared: SharedExperts | None = None,
) -> torch.Tensor:
    """``dispatch``, ``compute`` and ``combine`` with as little waiting as can be.

    Args:
        hidden_TD: ``(T, D)``; ``T`` may be 0, and differ among ranks.
        experts_TK: global expert ids ``(T, K)``.
        weights_TK: routing weights ``(T, K)``.
        compute: from rows grouped by local expert ``(R, D)`` and their numbers ``(e,)`` to outputs ``(R, D)``; called
            once for each chunk, some of which may have no row.
        num_experts: ``E``.
        chunks: parts in which tokens are dispatched.
        shared: the shared experts that are computed beside the dispatch, if any.

    Returns:
        ``(T, D)``: as ``combine``'s.
    """
    k = experts_TK.shape[-1]
    routes = plan(experts_TK, num_experts, group, chunks)
    sizes = [route.slot_order.numel() // k for route in routes]
    leaving = [
        _Flight.launched(to_slots(hidden, route, k), route.recv_splits, route.send_splits, group)
        for hidden, route in zip(hidden_TD.split(sizes), routes, strict=True)
    ]
    if shared is not None:
        shared.compute_ahead()
    returning = []
    for flight, route in zip(leaving, routes, strict=True):
        assert route.row_order is not None
        out_RD = compute(permute(flight.landed(), route.row_order), route.counts_e)
        out_RD = permute(out_RD, inverse(route.row_order))
        returning.append(_Flight.launched(out_RD, route.send_splits, route.recv_splits, group))
    outputs = [
        weighted_sum(flight.landed(), route, weights)
        for flight, route, weights in zip(returning, routes, weights_TK.split(sizes), strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _Flight:
    """An all-to-all of rows under way in forward, and later the one of their gradient."""

    def __init__(self, recv_splits: list[int], send_splits: list[int], group: dist.ProcessGroup):
        self.recv_splits, self.send_splits, self.group = recv_splits, send_splits, group
        self.pending: torch.Tensor | None = None
        self.under_way: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def launched(
        cls, rows: torch.Tensor, recv_splits: list[int], send_splits: list[int], group: dist.ProcessGroup
    ) -> "_Flight":
        flight = cls(recv_splits, send_splits, group)
        flight.pending = _Launch.apply(rows, flight)
        return flight

    def landed(self) -> torch.Tensor:
        pending, self.pending = self.pending, None
        return _Land.apply(pending, self)

    def start(self, rows: torch.Tensor, backward: bool) -> torch.Tensor:
        recv_splits, send_splits = self.recv_splits, self.send_splits
        if backward:
            recv_splits, send_splits = send_splits, recv_splits
        rows = rows.contiguous()
        out = rows.new_empty(sum(recv_splits), *rows.shape[1:])
        work = dist.all_to_all_single(out, rows, recv_splits, send_splits, group=self.group, async_op=True)
        self.under_way = (work, rows, out)
        return out

    def wait(self) -> torch.Tensor:
        assert self.under_way is not None
        (work, _, out), self.under_way = self.under_way, None
        work.wait()
        return out


class _Launch(torch.autograd.Function):
    """Rows set off: what is returned may be read after ``_Land`` alone. Their gradient arrives."""

    @staticmethod
    def forward(ctx, rows, flight):
        ctx.flight = flight
        return flight.start(rows, backward=False)

    @staticmethod
    def backward(ctx, _):
        return ctx.flight.wait(), None


class _Land(torch.autograd.Function):
    """Rows have arrived; their gradient sets off. It has the wrong shape for what is returned, so the flight has it."""

    @staticmethod
    def forward(ctx, rows, flight):
        ctx.flight = flight
        flight.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        ctx.flight.start(grad, backward=True)
        return grad, None
