"""Carries out a plan among the trainer's ranks: rounds of one all-to-all each, one under way while another is taken.

What arrives is handed on as it is: boxes that lie inside what the rank's own worker needs, in the model's order. A rank
holds two buffers that it sends from and two that it receives into, each bounded by the plan's limit.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ..engine.boxes import Box
from ..engine.lora_merge import LocalValues
from ..engine.shards import local_box, local_tensor
from .placement import Need, Tensor
from .plan import Piece, Plan, Transfer
from .traffic import Traffic

__all__ = ["Arrival", "Buffers", "Exchange", "Round", "starts"]


@dataclass(frozen=True)
class Arrival:
    """The values of a box of a tensor. They are the caller's until it asks for the next.

    Args:
        values: in the dtype in which they are sent; as they are stored where this rank has them itself.
    """

    tensor: Tensor
    box: Box
    values: torch.Tensor


@dataclass
class Buffers:
    """What a round is sent from and received into; two take turns."""

    out: torch.Tensor
    in_: torch.Tensor


@dataclass
class Round:
    """One all-to-all under way, out of and into ``buffers``."""

    index: int
    work: dist.Work
    buffers: Buffers


class _Shards:
    """What this rank holds of the trainer's tensors, looked up once each.

    Args:
        boxes: of the shards by the tensor's name, which stay as they are from sync to sync.
        values: what there is of a tensor; its shard by default.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
        boxes: dict[str, Box],
        values: LocalValues | None,
    ):
        self._tensors, self._dtypes, self._boxes = tensors, dtypes, boxes
        self._values = values or (lambda name, tensor: local_tensor(tensor).detach())
        self._local: dict[str, torch.Tensor] = {}

    def dtype(self, name: str) -> torch.dtype:
        """In which a tensor is sent."""
        return self._dtypes[name]

    def values(self, name: str, box: Box) -> torch.Tensor:
        """Of a box inside this rank's shard, as they are stored."""
        if name not in self._boxes:
            self._boxes[name] = local_box(self._tensors[name])
        if name not in self._local:
            with torch.no_grad():
                self._local[name] = self._values(name, self._tensors[name])
        return self._local[name][box.inside(self._boxes[name])]

    def keep(self, names: Collection[str]) -> None:
        """Let go of all others: what is merged with an adapter is memory of its own."""
        self._local = {name: local for name, local in self._local.items() if name in names}


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
        self._parts: dict[tuple[int, int, int, int], list[Transfer]] = {}
        self._boxes: dict[str, Box] = {}
        self._buffers: list[Buffers] = []
        self._splits = [self._split(pieces, self._at_once) for pieces in plan.rounds]
        self.traffic = Traffic()

    def assembled(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
        traffic: Traffic | None = None,
        values: LocalValues | None = None,
    ) -> Generator[tuple[str, Need, torch.Tensor], None, None]:
        """Yield ``(tensor's name, need, values)``, each need whole and the caller's own; otherwise as ``run``."""
        arriving = self.run(tensors, dtypes, traffic, values)
        name, missing = "", 0
        parts: list[tuple[Need, torch.Tensor]] = []
        try:
            for arrival in arriving:
                if not missing:
                    name = arrival.tensor.name
                    parts = [
                        (need, torch.empty(need.box.shape, dtype=dtypes[name], device=self.device))
                        for need in self._needs_of(arrival.tensor)
                    ]
                    missing = sum(need.box.numel for need, _ in parts)
                    self.traffic.hold(sum(buffer.nbytes for _, buffer in parts))
                for need, buffer in parts:
                    if arrival.box.shared_with(need.box) is not None:
                        buffer[arrival.box.inside(need.box)] = arrival.values
                missing -= arrival.box.numel
                while parts and not missing:
                    need, buffer = parts.pop(0)
                    yield name, need, buffer
                    self.traffic.release(buffer.nbytes)
        finally:
            arriving.close()

    def run(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
        traffic: Traffic | None = None,
        values: LocalValues | None = None,
    ) -> Generator[Arrival, None, None]:
        """Yield what this rank's worker needs, box by box, in the model's order; collective.

        Each box lies inside one need. Every round is issued on every rank, also where the consumer stops early: what
        is left is then received and dropped when the iterator is closed.

        Args:
            tensors: the trainer's parameters and buffers by name, sharded.
            dtypes: in which each is sent; cast before it is.
            traffic: counts what this run moves and holds.
            values: what this rank holds of a tensor, as it is to be sent; its shard by default.
        """
        self.traffic = traffic = traffic or Traffic()
        buffers = self._take_buffers()
        held = sum(buffer.out.nbytes + buffer.in_.nbytes for buffer in buffers)
        traffic.hold(held)
        shards = _Shards(tensors, dtypes, self._boxes, values)
        coming = self._start(0, buffers, shards)
        issued = 1
        try:
            while coming is not None:
                taken = coming
                coming = self._start(issued, buffers, shards)
                issued += 1
                yield from self._take(taken.index, self._finish(taken), shards)
        finally:
            while coming is not None:  # in the order of the others, who go on
                taken = coming
                coming = self._start(issued, buffers, shards)
                issued += 1
                self._finish(taken)
            traffic.release(held)
            if self.device.type != "cpu":
                self._buffers = []

    def _take_buffers(self) -> list[Buffers]:
        """What rounds are sent from and received into, in turn.

        On a GPU the caching allocator has them for others between syncs. A CPU has none, and there the faults of fresh
        pages take as long as half of the copies, so they stay.
        """
        if not self._buffers:
            self._buffers = [
                Buffers(*(self._empty(most) for most in self._largest())) for _ in range(min(2, len(self._splits)))
            ]
        return self._buffers

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _largest(self) -> tuple[int, int]:
        """Most bytes that this rank sends, and that it receives, in one round."""
        return max(sum(out) for out, _ in self._splits), max(sum(in_) for _, in_ in self._splits)

    def _split(
        self, pieces: Sequence[Piece], transfers: Callable[[Piece], Iterable[Transfer]]
    ) -> tuple[list[int], list[int]]:
        """Bytes to, and from, each rank in a round, of these transfers."""
        out, in_ = [0] * self._ranks, [0] * self._ranks
        for piece in pieces:
            itemsize = self.plan.tensor(piece)[1].tensor.itemsize
            for transfer in transfers(piece):
                if transfer.source == transfer.target:
                    continue
                if transfer.source == self.rank:
                    out[transfer.target] += transfer.box.numel * itemsize
                else:
                    in_[transfer.source] += transfer.box.numel * itemsize
        return out, in_

    def _start(self, index: int, buffers: Sequence[Buffers], shards: _Shards) -> Round | None:
        """Issue a round; None if there is none of that index."""
        if index >= len(self._splits):
            return None
        # The round before is still to be taken.
        shards.keep(
            {
                self.plan.tensor(piece)[0]
                for pieces in self.plan.rounds[max(0, index - 1) : index + 1]
                for piece in pieces
            }
        )
        send_splits, receive_splits = self._splits[index]
        buffer = buffers[index % 2]
        sent, received = buffer.out[: sum(send_splits)], buffer.in_[: sum(receive_splits)]
        at = starts(send_splits)
        for piece in self.plan.rounds[index]:
            name = self.plan.tensor(piece)[0]
            dtype = shards.dtype(name)
            for transfer in self._at_once(piece):
                if self.rank != transfer.source or transfer.source == transfer.target:
                    continue
                start = at[transfer.target]
                at[transfer.target] = stop = start + transfer.box.numel * dtype.itemsize
                _write(sent[start:stop], shards.values(name, transfer.box), dtype)
        self.traffic.sent += sent.numel()
        self.traffic.received += received.numel()
        work = dist.all_to_all_single(received, sent, receive_splits, send_splits, group=self.group, async_op=True)
        assert work is not None
        return Round(index, work, buffer)

    def _finish(self, taken: Round) -> torch.Tensor:
        """Wait for a round; returns what it brought, source by source."""
        taken.work.wait()
        return taken.buffers.in_[: sum(self._arriving(taken.index))]

    def _arriving(self, index: int) -> list[int]:
        """Bytes that a round brings from each source."""
        return self._splits[index][1]

    def _take(self, index: int, received: torch.Tensor, shards: _Shards) -> Iterator[Arrival]:
        at = starts(self._arriving(index))
        for piece in self.plan.rounds[index]:
            name, plan = self.plan.tensor(piece)
            tensor, dtype = replace(plan.tensor, name=name), shards.dtype(name)
            for transfer in self._transfers(piece):
                if transfer.target != self.rank:
                    continue
                if transfer.source == self.rank:
                    values = shards.values(name, transfer.box)
                else:
                    start = at[transfer.source]
                    at[transfer.source] = stop = start + transfer.box.numel * dtype.itemsize
                    values = _read(received[start:stop], dtype).view(transfer.box.shape)
                yield Arrival(tensor, transfer.box, values)

    def _at_once(self, piece: Piece) -> Iterable[Transfer]:
        """Those of this rank's that a round begins with: all, where nobody passes on."""
        return self._transfers(piece)

    def _transfers(self, piece: Piece) -> list[Transfer]:
        """This rank's part of a piece; the same for layers that are alike."""
        template = self.plan.layers[piece.group][1]
        key = (template, piece.index, piece.part, piece.parts)
        if key not in self._parts:
            parts = (transfer.part(piece.part, piece.parts) for transfer in self._mine[template][piece.index])
            self._parts[key] = [part for part in parts if part is not None]
        return self._parts[key]


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each part begins that follows the ones before it."""
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _write(flat: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Cast and copy in one pass, where the bytes are aligned for ``dtype``."""
    if flat.storage_offset() % dtype.itemsize == 0:
        flat.view(dtype).view(values.shape).copy_(values)
    else:
        flat.copy_(values.to(flat.device, dtype).reshape(-1).contiguous().view(torch.uint8))


def _read(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (flat if flat.storage_offset() % dtype.itemsize == 0 else flat.clone()).view(dtype)
