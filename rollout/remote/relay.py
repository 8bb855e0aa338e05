"""What several workers of one node need crosses the network once, and is passed on inside the node.

Replicas of a rollout need the same slices, and so do the workers of one replica for norms, routers and shared heads. A
relayed plan is the same plan but for its sources: of the workers of a node that need a box, one receives it from the
trainer's rank that owns it, and is the source of the others. Workers on the source's own node are fed directly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ...engine.topology.index_ranges import IndexRange
from ..layout.transfer_plan import Piece, Plan, TensorPlan, Transfer
from ..transport.exchange import Exchange, Round
from ..transport.round_blocks import starts

__all__ = ["RelayedExchange", "relayed"]


def relayed(plan: Plan, nodes: Sequence[str]) -> Plan:
    """The plan with relays.

    Args:
        plan: its sources and targets are numbered alike, and no rank is both.
        nodes: of each rank.
    """
    templates = tuple(
        replace(template, tensors=tuple(_relayed(tensor, nodes) for tensor in template.tensors))
        for template in plan.templates
    )
    return replace(plan, templates=templates)


def _relayed(tensor: TensorPlan, nodes: Sequence[str]) -> TensorPlan:
    takers: dict[tuple[IndexRange, str], list[Transfer]] = {}
    for transfer in tensor.transfers:
        if nodes[transfer.source] != nodes[transfer.target]:
            takers.setdefault((transfer.box, nodes[transfer.target]), []).append(transfer)
    changed: dict[Transfer, Transfer] = {}
    for turn, shared in enumerate(takers.values()):
        first = shared[turn % len(shared)]  # in turn, so that every worker of a node receives and passes on alike
        changed |= {t: replace(t, source=first.target) for t in shared if t is not first}
    return replace(tensor, transfers=tuple(sorted(changed.get(t, t) for t in tensor.transfers)))


class RelayedExchange(Exchange):
    """An exchange in which targets pass on what they have received: where they do, a round is two all-to-alls.

    Args:
        sources: ranks below this one own tensors, the others receive and pass on.
    """

    def __init__(self, *args: Any, sources: int, **kwargs: Any):
        self._sources = sources
        super().__init__(*args, **kwargs)
        transfers = (t for template in self.plan.templates for tensor in template.tensors for t in tensor.transfers)
        self._passes_on = any(t.source >= sources for t in transfers)
        self._passed = [self._split(pieces, self._afterwards) for pieces in self.plan.rounds]

    def _at_once(self, piece: Piece) -> Iterable[Transfer]:
        return (t for t in self._transfers(piece) if t.source < self._sources)

    def _afterwards(self, piece: Piece) -> Iterable[Transfer]:
        return (t for t in self._transfers(piece) if t.source >= self._sources)

    def _largest(self) -> tuple[int, int]:
        out = max(
            max(sum(first), sum(second)) for (first, _), (second, _) in zip(self._splits, self._passed, strict=True)
        )
        return out, max(sum(self._arriving(index)) for index in range(len(self._splits)))

    def _arriving(self, index: int) -> list[int]:
        # Those that pass on come after the owners, so this is also the order in what a rank has received.
        return [a + b for a, b in zip(self._splits[index][1], self._passed[index][1], strict=True)]

    def _finish(self, taken: Round) -> torch.Tensor:
        received = super()._finish(taken)
        if self._passes_on:
            self._pass_on(taken, received)
        return received

    def _pass_on(self, taken: Round, received: torch.Tensor) -> None:
        """Send on what others take of a round that has arrived, and receive what others send on."""
        send_splits, receive_splits = self._passed[taken.index]
        sent = taken.buffers.out[: sum(send_splits)]  # what it held has arrived
        at, to = starts(self._splits[taken.index][1]), starts(send_splits)
        for piece in self.plan.rounds[taken.index]:
            itemsize = self.plan.tensor(piece)[1].tensor.itemsize
            held: dict[IndexRange, torch.Tensor] = {}
            for transfer in self._at_once(piece):
                if transfer.target == self.rank:
                    start = at[transfer.source]
                    at[transfer.source] = stop = start + transfer.box.numel * itemsize
                    held[transfer.box] = received[start:stop]
            for transfer in self._afterwards(piece):
                if transfer.source == self.rank:
                    start = to[transfer.target]
                    to[transfer.target] = stop = start + transfer.box.numel * itemsize
                    sent[start:stop] = held[transfer.box]
        passed = received[len(received) - sum(receive_splits) :]
        self.traffic.sent += sent.numel()
        self.traffic.received += passed.numel()
        dist.all_to_all_single(passed, sent, receive_splits, send_splits, group=self.group)
