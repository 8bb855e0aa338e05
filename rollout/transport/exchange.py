"""Carries out a plan among the trainer's ranks: rounds of one all-to-all each, one under way while another is taken.

What arrives is handed on as it is: boxes that lie inside what the rank's own worker needs, in the model's order. A rank
holds two buffers that it sends from, two that it receives into and one of casts, each bounded by the plan's limit. A
consumer that would copy what arrives can have it arrive in memory of its own instead (``Landing``).
"""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist

from ...engine.lora.merge import LocalValues
from ...engine.topology.index_ranges import IndexRange
from ..layout.transfer_plan import Piece, Plan, Transfer
from ..layout.vllm_layout import Need, Tensor
from .report import Traffic
from .round_blocks import (
    LocalBlock,
    LocalShards,
    PackedBox,
    PieceTransfers,
    SendBlock,
    read_as,
    shared_rows,
    starts,
    write_as,
)

__all__ = ["Arrival", "Buffers", "Exchange", "Landing", "Round"]

_CACHED_BYTES = 2 << 20  # what is cast and then taken apart should still be in a cache


@dataclass(frozen=True)
class Arrival:
    """The values of a box of a tensor. They are the caller's until it asks for the next.

    Args:
        values: in the dtype in which they are sent; maybe as they are stored where this rank has them itself.
    """

    tensor: Tensor
    box: IndexRange
    values: torch.Tensor


@dataclass
class Buffers:
    """What a round is sent from and received into, of which two take turns, and where it keeps its worker's own."""

    out: torch.Tensor
    in_: torch.Tensor
    kept: torch.Tensor


@dataclass
class Round:
    """One all-to-all under way, out of and into ``buffers``."""

    index: int
    work: dist.Work
    buffers: Buffers


class Landing(Protocol):
    """Memory of a consumer's own in which rounds may arrive."""

    def room(self, sizes: Sequence[int], largest: int) -> list[torch.Tensor]:
        """A buffer of each size in bytes, as many of the first ones as there is room for.

        What is handed over from elsewhere has at most ``largest`` bytes.
        """

    def vacate(self) -> None:
        """What has been handed over may be overwritten after this. Raises nothing, since rounds have to go on."""


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
        self._pieces: dict[tuple[int, int, int, int], list[Transfer]] = {}
        self._shares: dict[Piece, PieceTransfers] = {}
        self._boxes: dict[str, IndexRange] = {}
        self._gifts: list[list[SendBlock]] = []
        self._own: list[list[LocalBlock]] = []
        self._brought: dict[int, list[tuple[Tensor, IndexRange, int]]] = {}
        self._out: list[torch.Tensor] = []
        self._in: list[torch.Tensor] = []
        self._cast = self._empty(0)
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
        parts: dict[str, list[tuple[Need, torch.Tensor]]] = {}
        missing: dict[str, int] = {}
        with contextlib.closing(arriving):
            for arrival in arriving:
                name = arrival.tensor.name
                if name not in parts:
                    parts[name] = [
                        (need, torch.empty(need.box.shape, dtype=dtypes[name], device=self.device))
                        for need in self._needs_of(arrival.tensor)
                    ]
                    missing[name] = sum(need.box.numel for need, _ in parts[name])
                    self.traffic.hold(sum(buffer.nbytes for _, buffer in parts[name]))
                for need, buffer in parts[name]:
                    if arrival.box.intersection(need.box) is not None:
                        buffer[arrival.box.slices_in(need.box)] = arrival.values
                missing[name] -= arrival.box.numel
                while parts[name] and not missing[name]:
                    need, buffer = parts[name].pop(0)
                    yield name, need, buffer
                    self.traffic.release(buffer.nbytes)

    def run(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
        traffic: Traffic | None = None,
        values: LocalValues | None = None,
        landing: Landing | None = None,
    ) -> Generator[Arrival, None, None]:
        """Yield what this rank's worker needs, box by box; collective.

        Each box lies inside one need. Rounds come in the model's order; what this rank has itself of one is yielded
        before what comes with it, and after the round before, so that a worker waits for parts of few layers at a time.
        Every round is issued on every rank, also
        where the consumer stops early: what is left is then received and dropped when the iterator is closed.

        Args:
            tensors: the trainer's parameters and buffers by name, sharded.
            dtypes: in which each is sent; cast before it is.
            traffic: counts what this run moves and holds.
            values: what this rank holds of a tensor, as it is to be sent; its shard by default.
            landing: where rounds arrive, and what a rank keeps for its own worker is cast to, if there is room; it is
                the caller's until it is vacated.
        """
        self.traffic = traffic = traffic or Traffic()
        shards = LocalShards(tensors, dtypes, self._boxes, values)
        if not self._gifts:
            for index in range(len(self._splits)):
                self._prepare(index, shards)
        buffers = self._make_buffers(landing)
        held = sum(buffer.nbytes for buffer in (*self._out, *self._in, self._cast))
        traffic.hold(held)
        arriving = self._arrivals(shards, buffers, landing)
        try:
            for arrival in arriving:  # noqa: UP028  (which would close it)
                yield arrival
        finally:
            for _ in arriving:  # in the order of the others, who go on
                pass
            traffic.release(held)
            if self.device.type != "cpu":
                self._out, self._in = [], []

    def _arrivals(self, shards: LocalShards, buffers: list[Buffers], landing: Landing | None) -> Iterator[Arrival]:
        coming: Round | None = None
        for index in range(len(self._splits)):
            if landing is not None:
                landing.vacate()
            self._fill(index, buffers[index % 2], shards)
            issued = self._issue(index, buffers[index % 2])
            if coming is not None:
                yield from self._take(coming, shards)
            yield from self._hand_over(index, buffers[index % 2], shards)
            coming = issued
        if coming is not None:
            yield from self._take(coming, shards)

    def _make_buffers(self, landing: Landing | None) -> list[Buffers]:
        """What rounds are sent from and received into, in turn, and what rows are cast into.

        On a GPU the caching allocator has them for others between syncs. A CPU has none, and there the faults of fresh
        pages take as long as half of the copies, so they stay.
        """
        if not self._splits:
            return []
        count, (out, in_) = min(2, len(self._splits)), self._largest()
        if not self._out:
            self._out = [self._empty(out) for _ in range(count)]
            self._cast = self._empty(max((gift.cast_bytes for gifts in self._gifts for gift in gifts), default=0))
        kept = max((own.kept.stop for owns in self._own for own in owns if own.kept), default=0)
        sizes = [in_] * count + [kept]
        landed = landing.room(sizes, self._largest_box) if landing is not None else []
        short = sizes[len(landed) :]
        if len(self._in) < len(short):
            self._in = [self._empty(size) for size in short]
        *arrive, kept = (*landed, *self._in[len(self._in) - len(short) :])
        return [Buffers(*pair, kept) for pair in zip(self._out, arrive, strict=True)]

    @cached_property
    def _largest_box(self) -> int:
        """Most bytes that are handed over at once."""
        shares = map(self._share, itertools.chain(*self.plan.rounds))
        mine = ((s, t) for s in shares for t in (*s.given, *s.taken) if t.target == self.rank)
        return max((transfer.box.numel * share.tensor.itemsize for share, transfer in mine), default=0)

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

    def _fill(self, index: int, buffers: Buffers, shards: LocalShards) -> None:
        """Write what a round sends, and keep what was cast with it for this rank's worker."""
        gifts, own = self._gifts[index], self._own[index]
        shards.keep({gift.tensor.name for gift in gifts} | {box.tensor.name for box in own})
        for gift in gifts:
            name = gift.tensor.name
            dtype, values = shards.dtype(name), shards.values(name)
            if gift.rows is not None:
                values = self._cast[: gift.cast_bytes].view(dtype).view(gift.shape).copy_(values[gift.rows])
            for part in gift.parts:
                write_as((buffers.kept if part.is_kept else buffers.out)[part.to], values[part.inside], dtype)

    def _hand_over(self, index: int, buffers: Buffers, shards: LocalShards) -> Iterator[Arrival]:
        """What this rank's worker takes of its own in a round."""
        for own in self._own[index]:
            if own.kept is not None:
                values = buffers.kept[own.kept].view(shards.dtype(own.tensor.name)).view(own.box.shape)
            else:
                values = shards.values(own.tensor.name)[own.inside]
            yield Arrival(own.tensor, own.box, values)

    def _prepare(self, index: int, shards: LocalShards) -> None:
        """Work out what this rank gives in a round.

        To read columns takes a CPU about as long as to read their rows whole. So boxes that are columns of the same
        rows would take as long as that many casts of the rows, if each were cast while it is copied. The rows are cast
        instead, some at a time, and the worker's own columns are kept until it is their turn.
        """
        gifts: list[SendBlock] = []
        own: list[LocalBlock] = []
        at, kept = starts(self._splits[index][0]), 0
        for piece in self.plan.rounds[index]:
            share = self._share(piece)
            if not share.given:
                continue
            tensor, itemsize, shard = share.tensor, share.tensor.itemsize, shards.box(share.tensor.name)
            to_keep = -(-kept // itemsize) * itemsize
            rows = self._cast_first(share, shards, to_keep)
            begins: list[tuple[Transfer, int]] = []
            for transfer in share.given:
                nbytes = transfer.box.numel * itemsize
                if transfer.target != self.rank:
                    begins.append((transfer, at[transfer.target]))
                    at[transfer.target] += nbytes
                    continue
                where = None
                if rows:
                    begins.append((transfer, to_keep))
                    where = slice(to_keep, to_keep + nbytes)
                    kept = to_keep = to_keep + nbytes
                own.append(LocalBlock(tensor, transfer.box, transfer.box.slices_in(shard), where))
            for some in rows:
                parts = list(self._parts_of(begins, some, itemsize))
                gifts.append(SendBlock(tensor, some.slices_in(shard), some.shape, parts))
            if begins and not rows:
                gifts.append(SendBlock(tensor, None, (), list(self._parts_of(begins, shard, itemsize))))
        self._gifts.append(gifts)
        self._own.append(own)

    def _cast_first(self, share: PieceTransfers, shards: LocalShards, kept: int) -> list[IndexRange]:
        """The rows to cast before they are taken apart, if any, where so many bytes are kept already.

        What is kept, and a cast, are within the plan's limit together.
        """
        if self.device.type != "cpu" or not shards.is_cast(share.tensor.name):
            return []
        most = min(_CACHED_BYTES, self.plan.limit // 2)
        own = sum(t.box.numel for t in share.given if t.target == self.rank) * share.tensor.itemsize
        if kept + own + most > self.plan.limit:
            return []
        return list(shared_rows([t.box for t in share.given], most // share.tensor.itemsize))

    def _parts_of(self, begins: Iterable[tuple[Transfer, int]], held: IndexRange, itemsize: int) -> Iterator[PackedBox]:
        """What is written of a part of the shard; transfers begin at some byte of what is sent, or kept."""
        for transfer, begin in begins:
            box = transfer.box.intersection(held)
            if box is not None:
                start = begin + transfer.box.elements_before(box) * itemsize
                to = slice(start, start + box.numel * itemsize)
                yield PackedBox(box.slices_in(held), to, transfer.target == self.rank)

    def _issue(self, index: int, buffers: Buffers) -> Round:
        send_splits, receive_splits = self._splits[index]
        sent, received = buffers.out[: sum(send_splits)], buffers.in_[: sum(receive_splits)]
        self.traffic.sent += sent.numel()
        self.traffic.received += received.numel()
        work = dist.all_to_all_single(received, sent, receive_splits, send_splits, group=self.group, async_op=True)
        assert work is not None
        return Round(index, work, buffers)

    def _finish(self, taken: Round) -> torch.Tensor:
        """Wait for a round; returns what it brought, source by source."""
        taken.work.wait()
        return taken.buffers.in_[: sum(self._arriving(taken.index))]

    def _arriving(self, index: int) -> list[int]:
        """Bytes that a round brings from each source."""
        return self._splits[index][1]

    def _take(self, coming: Round, shards: LocalShards) -> Iterator[Arrival]:
        """Wait for a round; yield what it brings."""
        received = self._finish(coming)
        for tensor, box, start in self._brought_by(coming.index):
            values = read_as(received[start : start + box.numel * tensor.itemsize], shards.dtype(tensor.name))
            yield Arrival(tensor, box, values.view(box.shape))

    def _brought_by(self, index: int) -> list[tuple[Tensor, IndexRange, int]]:
        """What a round brings, and where in what is received it begins."""
        if index not in self._brought:
            at = starts(self._arriving(index))
            self._brought[index] = brought = []
            for share in map(self._share, self.plan.rounds[index]):
                for transfer in share.taken:
                    brought.append((share.tensor, transfer.box, at[transfer.source]))
                    at[transfer.source] += transfer.box.numel * share.tensor.itemsize
        return self._brought[index]

    def _share(self, piece: Piece) -> PieceTransfers:
        if piece not in self._shares:
            name, plan = self.plan.tensor(piece)
            given = [t for t in self._at_once(piece) if t.source == self.rank]
            taken = [t for t in self._transfers(piece) if t.target == self.rank != t.source]
            self._shares[piece] = PieceTransfers(replace(plan.tensor, name=name), given, taken)
        return self._shares[piece]

    def _at_once(self, piece: Piece) -> Iterable[Transfer]:
        """Those of this rank's that a round begins with: all, where nobody passes on."""
        return self._transfers(piece)

    def _transfers(self, piece: Piece) -> list[Transfer]:
        """This rank's part of a piece; the same for layers that are alike."""
        template = self.plan.layers[piece.group][1]
        key = (template, piece.index, piece.part, piece.parts)
        if key not in self._pieces:
            parts = (transfer.part(piece.part, piece.parts) for transfer in self._mine[template][piece.index])
            self._pieces[key] = [part for part in parts if part is not None]
        return self._pieces[key]
