"""Send rows to the ranks of their experts, and back: an all-to-all over ``ep``, and a gather over ``etp``.

    S rows of slots  -- all-to-all over ep -->  r rows  -- gather over etp -->        R rows, on each of the etp ranks
    S rows of slots  <-- all-to-all over ep --  r rows  <-- reduce-scatter over etp --  R summands of rows

The ``etp`` ranks hold a part of each of their experts. So each of them computes a summand of every row that one of them
received. Each line is the gradient of the other. A rank that holds whole experts has the all-to-all alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist

__all__ = ["AllToAll", "Gather", "RowExchange", "Started", "exchange_rows"]


@dataclass(frozen=True)
class Started:
    """A pending exchange; ``out`` is undefined before ``finish`` has returned."""

    out: torch.Tensor
    sent: torch.Tensor  # kept until then, so that its memory is not reused
    finish: Callable[[], object]


@dataclass(frozen=True)
class AllToAll:
    """The splits of one all-to-all, from the ranks of the tokens to those of their experts; a no-op without a group."""

    send_splits: list[int]
    recv_splits: list[int]
    group: dist.ProcessGroup | None

    def reversed(self) -> "AllToAll":
        """Return the other direction: the one of combine, or of the gradient."""
        return AllToAll(self.recv_splits, self.send_splits, self.group)

    def __call__(self, x_S: torch.Tensor) -> torch.Tensor:
        """Send rows, ``(S, ...)`` to ``(R, ...)``; not differentiable (``exchange_rows``)."""
        if self.group is None:
            return x_S
        out = self._empty_output(x_S)
        dist.all_to_all_single(out, x_S.contiguous(), self.recv_splits, self.send_splits, group=self.group)
        return out

    def start(self, x_S: torch.Tensor, out: torch.Tensor | None = None) -> Started:
        """Start to send rows, into ``out`` ``(R, ...)`` if it is there."""
        if self.group is None:
            return Started(x_S if out is None else out.copy_(x_S), x_S, lambda: None)
        sent, out = x_S.contiguous(), self._empty_output(x_S) if out is None else out
        splits = self.recv_splits, self.send_splits
        work = dist.all_to_all_single(out, sent, *splits, group=self.group, async_op=True)
        assert work is not None
        return Started(out, sent, work.wait)

    def _empty_output(self, x_S: torch.Tensor) -> torch.Tensor:
        return x_S.new_empty(sum(self.recv_splits), *x_S.shape[1:])


@dataclass(frozen=True)
class Gather:
    """An all-to-all over ``ep`` and a gather over ``etp``: the other ranks' rows in their order, then this rank's.

    This rank's rows are received in their final place. Each direction over ``etp`` is one all-to-all without them,
    because sizes differ among ranks. Then gloo has no gather or reduction, and NCCL's are as many broadcasts.
    """

    all_to_all: AllToAll
    sizes: list[int]  # received rows of each rank of ``group``
    group: dist.ProcessGroup  # the ranks that hold parts of the same experts

    def reversed(self) -> "ReduceScatter":
        return ReduceScatter(self)

    def __call__(self, x_S: torch.Tensor) -> torch.Tensor:
        started = self.start(x_S)
        started.finish()
        return started.out

    def start(self, x_S: torch.Tensor) -> Started:
        """Start the all-to-all over ``ep``; ``finish`` waits for it and gathers."""
        out = x_S.new_empty(sum(self.sizes), *x_S.shape[1:])
        own = self.all_to_all.start(x_S, out[self.others :])
        return Started(out, own.sent, partial(self._finish, out, own))

    def _finish(self, out: torch.Tensor, started: Started) -> None:
        started.finish()
        own, ranks = out[self.others :], len(self.sizes)
        sent = own if ranks == 2 else own.repeat(ranks - 1, *[1] * (own.dim() - 1))
        dist.all_to_all_single(out[: self.others], sent, *self.splits, group=self.group)

    @property
    def others(self) -> int:
        """Rows of the other ranks, which precede this rank's."""
        return sum(self.splits[0])

    @cached_property
    def splits(self) -> tuple[list[int], list[int]]:
        """By rank, none for this one: the rows of the others, and this rank's, which each of the others gets."""
        rank = dist.get_rank(self.group)
        others = [0 if r == rank else size for r, size in enumerate(self.sizes)]
        return others, [0 if r == rank else self.sizes[rank] for r in range(len(self.sizes))]


@dataclass(frozen=True)
class ReduceScatter:
    """The other direction of a ``Gather``: each rank gets the sum of all ranks' summands of the rows that it received.

    Summands are added in float32 if their dtype is lower, in the order of the ranks, this rank's last.
    """

    gather: Gather

    def reversed(self) -> Gather:
        return self.gather

    def __call__(self, x_R: torch.Tensor) -> torch.Tensor:
        return self.gather.all_to_all.reversed()(self._reduce(x_R))

    def start(self, x_R: torch.Tensor) -> Started:
        """Reduce over ``etp``, and start the all-to-all over ``ep``."""
        return self.gather.all_to_all.reversed().start(self._reduce(x_R))

    def _reduce(self, x_R: torch.Tensor) -> torch.Tensor:
        """Exchange the summands and add them up, ``(R, ...)`` to ``(r, ...)``."""
        gather, x_R = self.gather, x_R.contiguous()
        (others_rows, own_rows), own = gather.splits, x_R[gather.others :]
        received = x_R.new_empty(sum(own_rows), *x_R.shape[1:])
        dist.all_to_all_single(received, x_R[: gather.others], own_rows, others_rows, group=gather.group)
        if len(gather.sizes) == 2:
            return own + received  # computed in float32 and rounded once
        summands = received.view(len(gather.sizes) - 1, *own.shape)
        wide = torch.promote_types(own.dtype, torch.float32)
        return summands.sum(0, dtype=wide).add_(own).to(own.dtype)


RowExchange = AllToAll | Gather | ReduceScatter


def exchange_rows(x: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """Send rows; the gradient is sent in the other direction."""
    return _Exchange.apply(x, exchange)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange = exchange
        return exchange(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.exchange.reversed()(grad), None
