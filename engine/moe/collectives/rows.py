"""Send rows to the ranks of their experts, and back: an all-to-all over ``ep``, and what ``etp`` adds to it.

    S rows of slots  -- all-to-all over ep -->  r rows  -- gather over etp -->        R rows, on each of the etp ranks
    S rows of slots  <-- all-to-all over ep --  r rows  <-- reduce-scatter over etp --  R summands of rows

``etp`` ranks hold a part of each of their experts, so every one of them needs the rows that all of them received, and
what it computes of a row is a summand. Each line is the gradient of the other. A rank that holds whole experts has the
all-to-all alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["AllToAll", "Gather", "RowExchange", "Started", "exchange_rows"]


@dataclass(frozen=True)
class Started:
    """Rows that are on their way.

    Args:
        out: holds nothing before ``finish`` has returned.
        sent: kept until then, so that nothing else gets its memory.
    """

    out: torch.Tensor
    sent: torch.Tensor
    finish: Callable[[], object]


class RowExchange(Protocol):
    """One direction of sending rows; not differentiable (``exchange_rows``)."""

    def reversed(self) -> "RowExchange":
        """Return the other direction: combine's, or the one of the gradient."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Send one row per slot to the ranks of the experts, ``(S, ...)`` to ``(R, ...)``, or return one for each."""

    def start(self, x: torch.Tensor, /) -> Started:
        """Start to do so: the all-to-all is under way, and what ``etp`` adds comes before or after it."""


@dataclass(frozen=True)
class AllToAll:
    """The splits of one all-to-all, from the ranks of the tokens to those of their experts; a no-op without a group."""

    send_splits: list[int]
    recv_splits: list[int]
    group: dist.ProcessGroup | None

    def reversed(self) -> "AllToAll":
        return AllToAll(self.recv_splits, self.send_splits, self.group)

    def __call__(self, x_S: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return x_S
        out = self._empty_output(x_S)
        dist.all_to_all_single(out, x_S.contiguous(), self.recv_splits, self.send_splits, group=self.group)
        return out

    def start(self, x_S: torch.Tensor) -> Started:
        return Started(x_S, x_S, lambda: None) if self.group is None else self.start_into(self._empty_output(x_S), x_S)

    def start_into(self, out: torch.Tensor, x_S: torch.Tensor) -> Started:
        """Start to receive into ``out``, ``(R, ...)`` and contiguous."""
        if self.group is None:
            out.copy_(x_S)
            return Started(out, x_S, lambda: None)
        sent = x_S.contiguous()
        splits = self.recv_splits, self.send_splits
        work = dist.all_to_all_single(out, sent, *splits, group=self.group, async_op=True)
        assert work is not None
        return Started(out, sent, work.wait)

    def _empty_output(self, x_S: torch.Tensor) -> torch.Tensor:
        return x_S.new_empty(sum(self.recv_splits), *x_S.shape[1:])


@dataclass(frozen=True)
class Gather:
    """An all-to-all over ``ep`` and a gather over ``etp``: the rows of the other ranks in their order, then its own.

    Its own rows are received where they stay. Each direction is one all-to-all that leaves them out, for sizes differ
    among ranks, which gloo's collectives for gathering and reducing can't have and NCCL's are as many broadcasts for.

    Args:
        sizes: rows that each rank of ``group`` received.
        group: the ranks that hold parts of the same experts.
    """

    all_to_all: AllToAll
    sizes: list[int]
    group: dist.ProcessGroup

    def reversed(self) -> "ReduceScatter":
        return ReduceScatter(self)

    def __call__(self, x_S: torch.Tensor) -> torch.Tensor:
        started = self.start(x_S)
        started.finish()
        return started.out

    def start(self, x_S: torch.Tensor) -> Started:
        out = x_S.new_empty(sum(self.sizes), *x_S.shape[1:])
        own = self.all_to_all.start_into(out[self.others :], x_S)
        return Started(out, own.sent, partial(self._finish, out, own))

    def _finish(self, out: torch.Tensor, started: Started) -> None:
        """Wait for this rank's rows, and gather those of the others into ``out``, which has them at its end."""
        started.finish()
        own, ranks = out[self.others :], len(self.sizes)
        sent = own if ranks == 2 else own.repeat(ranks - 1, *[1] * (own.dim() - 1))
        dist.all_to_all_single(out[: self.others], sent, self.others_rows, self.own_rows, group=self.group)

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @cached_property
    def others(self) -> int:
        """Rows of the other ranks, which precede this rank's."""
        return sum(self.sizes) - self.sizes[self.rank]

    @cached_property
    def others_rows(self) -> list[int]:
        """By rank, the rows that are for the others to compute a summand of, none for this rank itself."""
        return [0 if rank == self.rank else size for rank, size in enumerate(self.sizes)]

    @cached_property
    def own_rows(self) -> list[int]:
        """By rank, the rows of this rank that the others have a summand of."""
        return [0 if rank == self.rank else self.sizes[self.rank] for rank in range(len(self.sizes))]


@dataclass(frozen=True)
class ReduceScatter:
    """The other direction of a ``Gather``: each rank gets the sum of what all computed of the rows that it received.

    Summands are added in float32 where their dtype is lower, in the order of the ranks but for its own, the last.
    """

    gather: Gather

    def reversed(self) -> Gather:
        return self.gather

    def __call__(self, x_R: torch.Tensor) -> torch.Tensor:
        return self.gather.all_to_all.reversed()(self._reduce(x_R))

    def start(self, x_R: torch.Tensor) -> Started:
        return self.gather.all_to_all.reversed().start(self._reduce(x_R))

    def _reduce(self, x_R: torch.Tensor) -> torch.Tensor:
        """Exchange the summands and add them up, ``(R, ...)`` to ``(r, ...)``."""
        gather, x_R = self.gather, x_R.contiguous()
        own = x_R[gather.others :]
        received = x_R.new_empty(sum(gather.own_rows), *x_R.shape[1:])
        dist.all_to_all_single(received, x_R[: gather.others], gather.own_rows, gather.others_rows, group=gather.group)
        if len(gather.sizes) == 2:
            return own + received  # which is computed in float32 and rounded once
        summands = received.view(len(gather.sizes) - 1, *own.shape)
        wide = torch.promote_types(own.dtype, torch.float32)
        return summands.sum(0, dtype=wide).add_(own).to(own.dtype)


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
