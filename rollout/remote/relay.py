"""Relays blocks inside a node, so that what several of its workers need crosses the network once.

Replicas of a rollout keep the same slices, and so do workers of one replica for norms, routers and shared heads. A plan
with relays differs from the original only in its sources: of the workers of a node that need a block, one receives it
from the trainer rank that owns it and sends it to the others. Workers on the source's own node receive it directly.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ...engine.topology.index_ranges import IndexRange
from ..layout.transfer_plan import Piece, TensorPlan, Transfer, TransferPlan
from ..transport.exchange import Exchange, PendingRound
from ..transport.round_blocks import offsets

__all__ = ["RelayedExchange", "with_relays"]


def with_relays(plan: TransferPlan, nodes: Sequence[str]) -> TransferPlan:
    """Return the plan with relays.

    Args:
        plan: sources and targets are ranks of one group, and no rank is both.
        nodes: the node of each rank.
    """
    templates = tuple(
        replace(template, tensors=tuple(_relay_tensor(tensor, nodes) for tensor in template.tensors))
        for template in plan.templates
    )
    return replace(plan, templates=templates)


def _relay_tensor(tensor: TensorPlan, nodes: Sequence[str]) -> TensorPlan:
    receivers: dict[tuple[IndexRange, str], list[Transfer]] = {}
    for transfer in tensor.transfers:
        if nodes[transfer.source] != nodes[transfer.target]:
            receivers.setdefault((transfer.block, nodes[transfer.target]), []).append(transfer)
    changed: dict[Transfer, Transfer] = {}
    for turn, shared in enumerate(receivers.values()):
        first = shared[turn % len(shared)]  # rotates, so that the workers of a node receive and send equally much
        changed |= {t: replace(t, source=first.target) for t in shared if t is not first}
    return replace(tensor, transfers=tuple(sorted(changed.get(t, t) for t in tensor.transfers)))


class RelayedExchange(Exchange):
    """An exchange whose workers relay received blocks; a round with relays takes a second all-to-all.

    Args:
        sources: ranks below this number own tensors; the others receive and relay.
        finish: waits for a collective, and raises if a member has failed (``SyncGroup.finish``).
    """

    def __init__(self, *args: Any, sources: int, finish: Callable[[dist.Work], None], **kwargs: Any):
        self._sources = sources
        super().__init__(*args, **kwargs)
        self._finish = finish
        transfers = (t for template in self.plan.templates for tensor in template.tensors for t in tensor.transfers)
        self._has_relays = any(t.source >= sources for t in transfers)
        self._relay_splits = [self._split(pieces, self._second_hop) for pieces in self.plan.rounds]

    def _first_hop(self, piece: Piece) -> Iterable[Transfer]:
        return (t for t in self._transfers(piece) if t.source < self._sources)

    def _second_hop(self, piece: Piece) -> Iterable[Transfer]:
        return (t for t in self._transfers(piece) if t.source >= self._sources)

    def _max_round_bytes(self) -> tuple[int, int]:
        out = max(
            max(sum(first), sum(second))
            for (first, _), (second, _) in zip(self._splits, self._relay_splits, strict=True)
        )
        return out, max(sum(self._receive_sizes(index)) for index in range(len(self._splits)))

    def _receive_sizes(self, index: int) -> list[int]:
        # Relaying ranks have higher numbers than owners, so this is also the order in the receive buffer.
        return [a + b for a, b in zip(self._splits[index][1], self._relay_splits[index][1], strict=True)]

    def _wait(self, pending: PendingRound) -> torch.Tensor:
        received = super()._wait(pending)
        if self._has_relays:
            self._relay(pending, received)
        return received

    def _relay(self, pending: PendingRound, received: torch.Tensor) -> None:
        """Send received blocks to the workers that they are relayed to, and receive relayed ones."""
        send_splits, receive_splits = self._relay_splits[pending.index]
        sent = pending.buffers.send[: sum(send_splits)]  # the first all-to-all no longer reads it
        at, to = offsets(self._splits[pending.index][1]), offsets(send_splits)
        for piece in self.plan.rounds[pending.index]:
            itemsize = self.plan.tensor(piece)[1].tensor.itemsize
            held: dict[IndexRange, torch.Tensor] = {}
            for transfer in self._first_hop(piece):
                if transfer.target == self.rank:
                    start = at[transfer.source]
                    at[transfer.source] = stop = start + transfer.block.numel * itemsize
                    held[transfer.block] = received[start:stop]
            for transfer in self._second_hop(piece):
                if transfer.source == self.rank:
                    start = to[transfer.target]
                    to[transfer.target] = stop = start + transfer.block.numel * itemsize
                    sent[start:stop] = held[transfer.block]
        relayed = received[len(received) - sum(receive_splits) :]
        self.traffic.sent += sent.numel()
        self.traffic.received += relayed.numel()
        work = dist.all_to_all_single(relayed, sent, receive_splits, send_splits, group=self.group, async_op=True)
        assert work is not None
        self._finish(work)
