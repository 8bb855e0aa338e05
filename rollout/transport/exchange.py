"""Executes a transfer plan among ranks: one all-to-all per round, started while the round before it is consumed.

Received blocks are yielded as they are, in the model's order; each lies inside one slice that the rank's worker keeps.
A rank has two send buffers, two receive buffers and one buffer for casts, each bounded by the plan's limit. A consumer
that would copy received blocks can provide the memory that they are received into instead (``ReceiveBuffers``).
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
from ...engine.topology.index_ranges import IndexRange, slices_in_shard
from ..layout.specs import TargetSlice, TensorSpec
from ..layout.transfer_plan import Piece, Transfer, TransferPlan
from .report import Traffic
from .round_blocks import (
    LocalBlock,
    LocalShards,
    PackedPart,
    PieceTransfers,
    SendBlock,
    enclosing_rows,
    offsets,
    read_as,
    write_as,
)

__all__ = ["Exchange", "PendingRound", "ReceiveBuffers", "RoundBuffers", "TensorBlock"]

_CACHED_BYTES = 2 << 20  # rows that are cast and then split should stay in a CPU cache


@dataclass(frozen=True)
class TensorBlock:
    """The values of a block of a tensor, valid until the next one is requested.

    Args:
        values: in the dtype in which they are sent; a local block may have the dtype in which it is stored.
    """

    tensor: TensorSpec
    block: IndexRange
    values: torch.Tensor


@dataclass
class RoundBuffers:
    """The uint8 buffers of a round: ``send`` and ``receive`` alternate, ``local`` holds casts for the own worker."""

    send: torch.Tensor
    receive: torch.Tensor
    local: torch.Tensor


@dataclass
class PendingRound:
    """A round whose all-to-all has started."""

    index: int
    work: dist.Work
    buffers: RoundBuffers


class ReceiveBuffers(Protocol):
    """Memory of the consumer that rounds are received into."""

    def allocate(self, sizes: Sequence[int], max_block_bytes: int) -> list[torch.Tensor]:
        """Return a uint8 buffer of each size in bytes, for as many of the first sizes as fit.

        Blocks that are yielded from other memory have at most ``max_block_bytes`` bytes.
        """

    def flush(self) -> None:
        """Consume all yielded blocks, since their memory is overwritten next. Must not raise: rounds have to go on."""


class Exchange:
    """Executes one rank's part of a plan, once per sync.

    Args:
        plan: equal on all ranks.
        slices_of: returns the slices of a tensor that this rank's worker keeps, as the plan was made with.
        rank: this process's rank in ``group``, which is also its number in the plan.
        device: the device of all buffers and yielded values.
    """

    def __init__(
        self,
        plan: TransferPlan,
        slices_of: Callable[[TensorSpec], Sequence[TargetSlice]],
        rank: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
    ):
        self.plan, self.rank, self.device, self.group = plan, rank, torch.device(device), group
        self._ranks = dist.get_world_size(group)
        self._slices_of = slices_of
        # By template and tensor, the transfers of this rank in the order in which both ends pack and unpack them.
        self._own_transfers = [
            [[t for t in tensor.transfers if rank in (t.source, t.target)] for tensor in template.tensors]
            for template in plan.templates
        ]
        self._pieces: dict[tuple[int, int, int, int], list[Transfer]] = {}
        self._piece_transfers: dict[Piece, PieceTransfers] = {}
        self._shard_blocks: dict[str, tuple[IndexRange, ...]] = {}
        self._send_blocks: list[list[SendBlock]] = []
        self._local_blocks: list[list[LocalBlock]] = []
        self._names: list[list[str]] = []  # of each round's tensors
        self._receive_offsets: dict[int, list[tuple[TensorSpec, IndexRange, int]]] = {}
        self._send_buffers: list[torch.Tensor] = []
        self._receive_buffers: list[torch.Tensor] = []
        self._cast_buffer = self._empty(0)
        self._finish: Callable[[dist.Work], object] = dist.Work.wait
        self._splits = [self._split(pieces, self._first_hop) for pieces in plan.rounds]
        self.traffic = Traffic()

    def assembled(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
        traffic: Traffic | None = None,
        values: LocalValues | None = None,
    ) -> Generator[tuple[str, TargetSlice, torch.Tensor], None, None]:
        """Yield ``(tensor's name, slice, values)`` with each slice assembled in memory of its own; see ``run``."""
        blocks = self.run(tensors, dtypes, traffic, values)
        parts: dict[str, list[tuple[TargetSlice, torch.Tensor]]] = {}
        missing: dict[str, int] = {}
        with contextlib.closing(blocks):
            for found in blocks:
                name = found.tensor.name
                if name not in parts:
                    parts[name] = [
                        (part, torch.empty(part.block.shape, dtype=dtypes[name], device=self.device))
                        for part in self._slices_of(found.tensor)
                    ]
                    missing[name] = sum(part.block.numel for part, _ in parts[name])
                    self.traffic.hold(sum(buffer.nbytes for _, buffer in parts[name]))
                for part, buffer in parts[name]:
                    if found.block.intersection(part.block) is not None:
                        buffer[found.block.slices_in(part.block)] = found.values
                missing[name] -= found.block.numel
                while parts[name] and not missing[name]:
                    part, buffer = parts[name].pop(0)
                    yield name, part, buffer
                    self.traffic.release(buffer.nbytes)

    def run(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
        traffic: Traffic | None = None,
        values: LocalValues | None = None,
        receive_buffers: ReceiveBuffers | None = None,
    ) -> Generator[TensorBlock, None, None]:
        """Yield the blocks that this rank's worker needs, each inside one slice; collective.

        Rounds come in the model's order. A round's local blocks are yielded before its received ones and after the
        round before it, so that few layers of the worker are partly loaded at a time. Every rank starts every round,
        even if its consumer stops early: closing the iterator receives and drops the rest.

        Args:
            tensors: the trainer's parameters and buffers by name, sharded.
            dtypes: the dtype in which each tensor is sent; it is cast before.
            traffic: counts the bytes that this run sends, receives and holds.
            values: returns the values to send for a tensor; its local shard by default.
            receive_buffers: memory for received blocks and for casts of local ones, as far as they fit; the yielded
                blocks in it stay valid until it is flushed.
        """
        self.traffic = traffic = traffic or Traffic()
        shards = LocalShards(tensors, dtypes, self._shard_blocks, values)
        if not self._send_blocks:
            for index in range(len(self._splits)):
                self._plan_packing(index, shards)
        buffers = self._allocate(receive_buffers)
        held = sum(buffer.nbytes for buffer in (*self._send_buffers, *self._receive_buffers, self._cast_buffer))
        traffic.hold(held)
        blocks = self._run_rounds(shards, buffers, receive_buffers)
        try:
            for found in blocks:  # noqa: UP028  (`yield from` would close `blocks` with this generator)
                yield found
        finally:
            for _ in blocks:  # other ranks go on with the remaining all-to-alls
                pass
            traffic.release(held)
            if self.device.type != "cpu":
                self._send_buffers, self._receive_buffers = [], []

    def _run_rounds(
        self, shards: LocalShards, buffers: list[RoundBuffers], receive_buffers: ReceiveBuffers | None
    ) -> Iterator[TensorBlock]:
        pending: PendingRound | None = None
        for index in range(len(self._splits)):
            if receive_buffers is not None:
                receive_buffers.flush()
            self._pack(index, buffers[index % 2], shards)
            started = self._start(index, buffers[index % 2])
            if pending is not None:
                yield from self._receive(pending, shards)
            yield from self._local_values(index, buffers[index % 2], shards)
            pending = started
        if pending is not None:
            yield from self._receive(pending, shards)

    def _allocate(self, receive_buffers: ReceiveBuffers | None) -> list[RoundBuffers]:
        """Allocate two sets of buffers, of which rounds use one after the other.

        A GPU's caching allocator lends the memory to others between syncs. A CPU has no such allocator, and page faults
        of fresh memory take half as long as the copies, so its buffers are kept.
        """
        if not self._splits:
            return []
        count, (send, receive) = min(2, len(self._splits)), self._max_round_bytes()
        if not self._send_buffers:
            self._send_buffers = [self._empty(send) for _ in range(count)]
            self._cast_buffer = self._empty(max((b.cast_bytes for b in itertools.chain(*self._send_blocks)), default=0))
        ranges = [block.buffer_range for block in itertools.chain(*self._local_blocks) if block.buffer_range]
        sizes = [receive] * count + [max((r.stop for r in ranges), default=0)]
        given = receive_buffers.allocate(sizes, self._max_block_bytes) if receive_buffers is not None else []
        rest = sizes[len(given) :]
        if len(self._receive_buffers) < len(rest):
            self._receive_buffers = [self._empty(size) for size in rest]
        *receive_into, local = (*given, *self._receive_buffers[len(self._receive_buffers) - len(rest) :])
        return [RoundBuffers(*pair, local) for pair in zip(self._send_buffers, receive_into, strict=True)]

    @cached_property
    def _max_block_bytes(self) -> int:
        """The most bytes of any block that is yielded."""
        pieces = map(self._transfers_of, itertools.chain(*self.plan.rounds))
        own = ((p, t) for p in pieces for t in (*p.outgoing, *p.incoming) if t.target == self.rank)
        return max((transfer.block.numel * piece.tensor.itemsize for piece, transfer in own), default=0)

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _max_round_bytes(self) -> tuple[int, int]:
        """Return the most bytes that this rank sends, and the most that it receives, in one round."""
        return max(sum(out) for out, _ in self._splits), max(sum(in_) for _, in_ in self._splits)

    def _split(
        self, pieces: Sequence[Piece], transfers: Callable[[Piece], Iterable[Transfer]]
    ) -> tuple[list[int], list[int]]:
        """Return the bytes that ``transfers`` of a round send to, and receive from, each rank."""
        out, in_ = [0] * self._ranks, [0] * self._ranks
        for piece in pieces:
            itemsize = self.plan.tensor(piece)[1].tensor.itemsize
            for transfer in transfers(piece):
                if transfer.source == transfer.target:
                    continue
                if transfer.source == self.rank:
                    out[transfer.target] += transfer.block.numel * itemsize
                else:
                    in_[transfer.source] += transfer.block.numel * itemsize
        return out, in_

    def _pack(self, index: int, buffers: RoundBuffers, shards: LocalShards) -> None:
        """Write what a round sends into its send buffer, and what is cast with it for the own worker into ``local``."""
        shards.hold(self._names[index])
        for block in self._send_blocks[index]:
            name = block.tensor.name
            dtype, values = shards.dtype(name), shards.values(name)
            if block.rows is not None:
                values = self._cast_buffer[: block.cast_bytes].view(dtype).view(block.shape).copy_(values[block.rows])
            for part in block.parts:
                write_as((buffers.local if part.is_local else buffers.send)[part.to], values[part.inside], dtype)

    def _local_values(self, index: int, buffers: RoundBuffers, shards: LocalShards) -> Iterator[TensorBlock]:
        """Yield the blocks of a round that this rank holds itself."""
        for own in self._local_blocks[index]:
            if own.buffer_range is not None:
                values = buffers.local[own.buffer_range].view(shards.dtype(own.tensor.name)).view(own.block.shape)
            else:
                values = shards.values(own.tensor.name)[own.inside]
            yield TensorBlock(own.tensor, own.block, values)

    def _plan_packing(self, index: int, shards: LocalShards) -> None:
        """Compute the send blocks and local blocks of a round.

        Reading columns takes a CPU about as long as reading the whole rows, so casting each block of columns while it
        is copied would cost as many casts of the rows as there are blocks. Instead some rows at a time are cast and
        split, and the own worker's columns wait in the local buffer.
        """
        send_blocks: list[SendBlock] = []
        local_blocks: list[LocalBlock] = []
        at, local_end = offsets(self._splits[index][0]), 0
        for piece in map(self._transfers_of, self.plan.rounds[index]):
            if not piece.outgoing:
                continue
            tensor, itemsize, shard = piece.tensor, piece.tensor.itemsize, shards.ranges(piece.tensor.name)
            local_at = -(-local_end // itemsize) * itemsize
            rows = self._rows_to_cast(piece, shards, local_at)
            begins: list[tuple[Transfer, int]] = []
            for transfer in piece.outgoing:
                nbytes = transfer.block.numel * itemsize
                if transfer.target != self.rank:
                    begins.append((transfer, at[transfer.target]))
                    at[transfer.target] += nbytes
                    continue
                buffer_range = None
                if rows:
                    begins.append((transfer, local_at))
                    buffer_range = slice(local_at, local_at + nbytes)
                    local_end = local_at = local_at + nbytes
                inside = slices_in_shard(transfer.block, shard)
                local_blocks.append(LocalBlock(tensor, transfer.block, inside, buffer_range))
            for some in rows:
                parts = list(self._packed_parts(begins, [some], itemsize))
                send_blocks.append(SendBlock(tensor, slices_in_shard(some, shard), some.shape, parts))
            if begins and not rows:
                send_blocks.append(SendBlock(tensor, None, (), list(self._packed_parts(begins, shard, itemsize))))
        self._send_blocks.append(send_blocks)
        self._local_blocks.append(local_blocks)
        self._names.append(list(dict.fromkeys(self._transfers_of(p).tensor.name for p in self.plan.rounds[index])))

    def _rows_to_cast(self, piece: PieceTransfers, shards: LocalShards, local_bytes: int) -> list[IndexRange]:
        """Return the rows to cast before they are split, if any.

        Only as many as keep ``local_bytes``, the piece's own part and one cast within the plan's limit.
        """
        if self.device.type != "cpu" or not shards.is_cast(piece.tensor.name):
            return []
        most = min(_CACHED_BYTES, self.plan.limit // 2)
        own = sum(t.block.numel for t in piece.outgoing if t.target == self.rank) * piece.tensor.itemsize
        if local_bytes + own + most > self.plan.limit:
            return []
        return list(enclosing_rows([t.block for t in piece.outgoing], most // piece.tensor.itemsize))

    def _packed_parts(
        self, begins: Iterable[tuple[Transfer, int]], ranges: Sequence[IndexRange], itemsize: int
    ) -> Iterator[PackedPart]:
        """Yield the parts of ``ranges`` that transfers take; each transfer begins at the given byte of its buffer."""
        for (transfer, begin), held in itertools.product(begins, ranges):
            block = transfer.block.intersection(held)
            if block is not None:
                start = begin + transfer.block.elements_before(block) * itemsize
                to = slice(start, start + block.numel * itemsize)
                yield PackedPart(slices_in_shard(block, ranges), to, transfer.target == self.rank)

    def _start(self, index: int, buffers: RoundBuffers) -> PendingRound:
        send_splits, receive_splits = self._splits[index]
        sent, received = buffers.send[: sum(send_splits)], buffers.receive[: sum(receive_splits)]
        self.traffic.sent += sent.numel()
        self.traffic.received += received.numel()
        work = dist.all_to_all_single(received, sent, receive_splits, send_splits, group=self.group, async_op=True)
        assert work is not None
        return PendingRound(index, work, buffers)

    def _wait(self, pending: PendingRound) -> torch.Tensor:
        """Wait for a round and return the bytes that it received, ordered by source."""
        self._finish(pending.work)
        return pending.buffers.receive[: sum(self._receive_sizes(pending.index))]

    def _receive_sizes(self, index: int) -> list[int]:
        """Return the bytes that a round receives from each source."""
        return self._splits[index][1]

    def _receive(self, pending: PendingRound, shards: LocalShards) -> Iterator[TensorBlock]:
        """Wait for a round and yield the blocks that it received."""
        received = self._wait(pending)
        for tensor, block, start in self._received_blocks(pending.index):
            values = read_as(received[start : start + block.numel * tensor.itemsize], shards.dtype(tensor.name))
            yield TensorBlock(tensor, block, values.view(block.shape))

    def _received_blocks(self, index: int) -> list[tuple[TensorSpec, IndexRange, int]]:
        """Return the blocks that a round receives, each with its first byte in the receive buffer."""
        if index not in self._receive_offsets:
            at = offsets(self._receive_sizes(index))
            self._receive_offsets[index] = found = []
            for piece in map(self._transfers_of, self.plan.rounds[index]):
                for transfer in piece.incoming:
                    found.append((piece.tensor, transfer.block, at[transfer.source]))
                    at[transfer.source] += transfer.block.numel * piece.tensor.itemsize
        return self._receive_offsets[index]

    def _transfers_of(self, piece: Piece) -> PieceTransfers:
        if piece not in self._piece_transfers:
            name, plan = self.plan.tensor(piece)
            outgoing = [t for t in self._first_hop(piece) if t.source == self.rank]
            incoming = [t for t in self._transfers(piece) if t.target == self.rank != t.source]
            self._piece_transfers[piece] = PieceTransfers(replace(plan.tensor, name=name), outgoing, incoming)
        return self._piece_transfers[piece]

    def _first_hop(self, piece: Piece) -> Iterable[Transfer]:
        """Return this rank's transfers in a round's first all-to-all: all of them, unless workers relay."""
        return self._transfers(piece)

    def _transfers(self, piece: Piece) -> list[Transfer]:
        """Return this rank's transfers of a piece; cached by template, since layers share them."""
        template = self.plan.layers[piece.group][1]
        key = (template, piece.index, piece.part, piece.parts)
        if key not in self._pieces:
            parts = (transfer.part(piece.part, piece.parts) for transfer in self._own_transfers[template][piece.index])
            self._pieces[key] = [part for part in parts if part is not None]
        return self._pieces[key]
