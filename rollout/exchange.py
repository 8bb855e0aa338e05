"""Carries out a plan among the trainer's ranks: rounds of one all-to-all each, one under way while another is taken.

What a rank hands on are the boxes that its own worker needs, whole, tensor by tensor in the model's order. A rank holds
two buffers that it sends from and two that it receives into, each bounded by the plan's limit, and the boxes of the
tensor that it is putting together.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ..engine.boxes import Box
from ..engine.shards import local_box, local_tensor
from .placement import Need, Tensor
from .plan import Piece, Plan, Transfer

__all__ = ["Exchange", "Traffic"]


@dataclass
class Traffic:
    """Bytes that went over the wire for this rank; what it had itself is not counted."""

    sent: int = 0
    received: int = 0


@dataclass
class _Round:
    """One all-to-all under way; its buffers live until it is taken."""

    pieces: Sequence[Piece]
    work: dist.Work
    sent: torch.Tensor
    received: torch.Tensor


class Exchange:
    """A rank's part in a plan, to be run once per sync.

    Args:
        plan: the same on all ranks.
        needs_of: what this rank's worker takes of a tensor; the plan was made with it.
        rank: of this process among the plan's sources and targets, which are the ranks of ``group``.
        device: where buffers are and tensors are handed over.
    """

    def __init__(
        self,
        plan: Plan,
        needs_of: Callable[[Tensor], Sequence[Need]],
        rank: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
    ):
        self.plan, self.rank, self.device, self.group = plan, rank, torch.device(device), group
        self._ranks = dist.get_world_size(group)
        self._needs_of = needs_of
        # By template and tensor: the transfers that concern this rank, in the order that both ends share.
        self._mine = [
            [[t for t in tensor.transfers if rank in (t.source, t.target)] for tensor in template.tensors]
            for template in plan.templates
        ]
        self.traffic = Traffic()

    def run(
        self, tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> Generator[tuple[str, Need, torch.Tensor], None, None]:
        """Yield ``(tensor's name, need, values)``, in the model's order; collective.

        Every round is issued on every rank, also where the consumer stops early: what is left is then received and
        dropped when the iterator is closed.

        Args:
            tensors: the trainer's parameters and buffers by name, sharded.
            dtypes: in which each is sent; cast before it is.
        """
        self.traffic = Traffic()
        rounds = self.plan.rounds
        coming = self._start(rounds[0], tensors, dtypes) if rounds else None
        issued = 1
        half_done: dict[str, list[torch.Tensor]] = {}
        try:
            while coming is not None:
                taken = coming
                coming = self._start(rounds[issued], tensors, dtypes) if issued < len(rounds) else None
                issued += 1
                taken.work.wait()
                yield from self._take(taken, half_done, tensors, dtypes)
        finally:
            while coming is not None:
                coming.work.wait()
                coming = self._start(rounds[issued], tensors, dtypes) if issued < len(rounds) else None
                issued += 1

    def _start(
        self, pieces: Sequence[Piece], tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> _Round:
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
        receive_splits = [0] * self._ranks
        for piece in pieces:
            name, itemsize = self._tensor(piece)
            held = local_box(tensors[name])
            local = local_tensor(tensors[name]).detach()
            for transfer in self._transfers(piece):
                if transfer.source == transfer.target:
                    continue
                if transfer.source == self.rank:
                    values = local[_inside(transfer.box, held)].to(self.device, dtypes[name])
                    outgoing[transfer.target].append(values.reshape(-1).contiguous().view(torch.uint8))
                else:
                    receive_splits[transfer.source] += transfer.box.numel * itemsize
        send_splits = [sum(part.numel() for part in parts) for parts in outgoing]
        flat = [part for parts in outgoing for part in parts]
        sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=self.device)
        received = torch.empty(sum(receive_splits), dtype=torch.uint8, device=self.device)
        self.traffic.sent += sent.numel()
        self.traffic.received += received.numel()
        work = dist.all_to_all_single(received, sent, receive_splits, send_splits, group=self.group, async_op=True)
        assert work is not None
        return _Round(pieces, work, sent, received)

    def _take(
        self,
        taken: _Round,
        half_done: dict[str, list[torch.Tensor]],
        tensors: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
    ) -> Iterator[tuple[str, Need, torch.Tensor]]:
        """Sort what a round brought into the needs, and yield those of each tensor whose last piece it was."""
        at = self._offsets(taken.pieces)
        for piece in taken.pieces:
            name, itemsize = self._tensor(piece)
            needs = self._needs_of(replace(self.plan.tensor(piece)[1].tensor, name=name))
            if name not in half_done:
                half_done[name] = [torch.empty(n.box.shape, dtype=dtypes[name], device=self.device) for n in needs]
            for transfer in self._transfers(piece):
                if transfer.target != self.rank:
                    continue
                if transfer.source == self.rank:
                    values = local_tensor(tensors[name]).detach()[_inside(transfer.box, local_box(tensors[name]))]
                else:
                    start = at[transfer.source]
                    at[transfer.source] = stop = start + transfer.box.numel * itemsize
                    values = taken.received[start:stop].view(dtypes[name]).view(transfer.box.shape)
                for need, buffer in zip(needs, half_done[name], strict=True):
                    if transfer.box.shared_with(need.box) is not None:
                        buffer[_inside(transfer.box, need.box)] = values
            if piece.part == piece.parts - 1:
                for need, buffer in zip(needs, half_done.pop(name), strict=True):
                    yield name, need, buffer

    def _offsets(self, pieces: Sequence[Piece]) -> list[int]:
        """Where each source's bytes begin in what a round received."""
        sizes = [0] * self._ranks
        for piece in pieces:
            itemsize = self._tensor(piece)[1]
            for transfer in self._transfers(piece):
                if transfer.target == self.rank != transfer.source:
                    sizes[transfer.source] += transfer.box.numel * itemsize
        return [sum(sizes[:rank]) for rank in range(self._ranks)]

    def _tensor(self, piece: Piece) -> tuple[str, int]:
        name, plan = self.plan.tensor(piece)
        return name, plan.tensor.itemsize

    def _transfers(self, piece: Piece) -> Iterator[Transfer]:
        """This rank's part of a piece."""
        for transfer in self._mine[self.plan.layers[piece.group][1]][piece.index]:
            part = transfer.part(piece.part, piece.parts)
            if part is not None:
                yield part


def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """``box`` in coordinates of ``outer``."""
    return tuple(
        slice(low - origin, high - origin) for low, high, origin in zip(box.low, box.high, outer.low, strict=True)
    )
