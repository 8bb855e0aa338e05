"""Plans which rank sends which block of which tensor to which worker, in rounds of bounded size.

A plan is a pure function of the trainer's and the rollout's layouts (``slices.py``), so every rank computes it on
its own, and ranks compare digests. Layers with the same tensors share one plan, a *template*: planning a model of 94
layers for 64 ranks takes seconds.

A round is a list of *pieces*, each the ``part``-th of ``parts`` of a tensor. Every transfer of that tensor is divided
into as many parts, so the bytes of a round are spread over the ranks as those of the whole tensor are. Every rank takes
part in every round, whether or not it has anything to send.
"""

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...engine.topology.index_ranges import IndexRange, chunk_range
from .slices import holders
from .specs import TargetSlice, TensorSpec, TrainerTopology

__all__ = [
    "ROUND_BUFFERS",
    "Piece",
    "TransferPlan",
    "Targets",
    "Template",
    "Transfer",
    "make_transfer_plan",
    "round_bytes",
]

# What sends, receives or keeps: ("sent", a trainer's rank), ("received", a worker) or ("kept", a rank for its worker).
End = tuple[str, int]
# Two send buffers, two receive buffers, and one for what is cast before it is packed.
ROUND_BUFFERS = 5


def round_bytes(memory_bytes: int) -> int:
    """Return the bytes that a rank may send, and receive, per round so that all its buffers fit ``memory_bytes``."""
    return memory_bytes // ROUND_BUFFERS


@dataclass(frozen=True, order=True)
class Transfer:
    """A block of a tensor that rank ``source`` sends to rank or worker ``target``."""

    block: IndexRange
    source: int
    target: int

    def part(self, part: int, parts: int) -> "Transfer | None":
        """Return the ``part``-th of ``parts``, split along the first dim that is long enough; None if empty."""
        shape = self.block.shape
        if not shape:
            return self if part == 0 else None
        dim = _split_dim(shape, parts)
        start, stop = chunk_range(self.block.low[dim], self.block.high[dim], parts, part)
        return Transfer(self.block.with_dim(dim, start, stop), self.source, self.target) if start < stop else None


@dataclass(frozen=True)
class Targets:
    """The receiving workers.

    Args:
        count: number of rollout workers over all replicas.
        colocated: whether trainer rank ``i`` feeds worker ``i`` on the same device, so that what the rank holds itself
            is not sent. Otherwise the workers are separate processes.
    """

    count: int
    colocated: bool = True


@dataclass(frozen=True)
class TensorPlan:
    """The transfers of one tensor, including local ones (``source == target`` where colocated)."""

    tensor: TensorSpec
    transfers: tuple[Transfer, ...]
    colocated: bool

    def is_local(self, transfer: Transfer) -> bool:
        return self.colocated and transfer.source == transfer.target

    @property
    def remote_transfers(self) -> Iterator[Transfer]:
        return (t for t in self.transfers if not self.is_local(t))

    def max_rank_bytes(self, part: int = 0, parts: int = 1) -> int:
        """Return the most bytes that any rank sends or receives for this part."""
        return max((size for (end, _), size in self.rank_bytes(part, parts).items() if end != "kept"), default=0)

    @cached_property
    def _counts(self) -> dict[tuple[int, ...], Counter[End]]:
        """How many blocks of a shape each end has: the size of a part depends on nothing else."""
        counts: dict[tuple[int, ...], Counter[End]] = {}
        for transfer in self.transfers:
            ends = counts.setdefault(transfer.block.shape, Counter())
            if self.is_local(transfer):
                ends["kept", transfer.target] += 1
                continue
            ends["sent", transfer.source] += 1
            ends["received", transfer.target] += 1
        return counts

    def rank_bytes(self, part: int = 0, parts: int = 1) -> dict[End, int]:
        """Return the bytes sent by each source, ``("sent", rank)``, received by each target, and kept by each rank."""
        nbytes: dict[End, int] = {}
        for shape, ends in self._counts.items():
            if size := _part_numel(shape, part, parts) * self.tensor.itemsize:
                for end, count in ends.items():
                    nbytes[end] = nbytes.get(end, 0) + count * size
        return nbytes

    @property
    def max_parts(self) -> int:
        """The largest number of parts into which the tensor can be divided."""
        return max((max(t.block.shape, default=1) for t in self.remote_transfers), default=1)

    def parts_for_limit(self, limit: int) -> int:
        """Return the number of parts with which no rank sends or receives more than ``limit`` bytes per part.

        Where possible a part has at most a quarter of ``limit``, so that rounds can be filled.

        Raises:
            ValueError: a single row has more than ``limit`` bytes.
        """
        max_parts = self.max_parts
        parts = min(max_parts, max(1, -(-4 * self.max_rank_bytes() // limit)))
        # The first part is the largest.
        while (load := self.max_rank_bytes(0, parts)) > limit / 4 and parts < max_parts:
            parts = min(max_parts, parts + max(1, parts // 8))
        if load > limit:
            raise ValueError(
                f"one row of {self.tensor.name} {list(self.tensor.shape)} is {load} bytes on a rank, more than the "
                f"{limit} bytes that a round may hold."
            )
        return parts

    def divided(self, limit: int) -> tuple[int, list[tuple[int, int, dict[End, int]]]]:
        """Return ``parts_for_limit``, and each run of parts with the same bytes: the first, the last, exclusive, and
        their ``rank_bytes``.
        """
        parts = self.parts_for_limit(limit)
        runs = []
        for _, run in itertools.groupby(range(parts), lambda part: [_part_numel(s, part, parts) for s in self._counts]):
            first, *others = run
            runs.append((first, first + 1 + len(others), self.rank_bytes(first, parts)))
        return parts, runs


@dataclass(frozen=True)
class Template:
    """The tensor plans that layers of the same shapes share; names are relative to the layer."""

    tensors: tuple[TensorPlan, ...]


@dataclass(frozen=True)
class Piece:
    """The ``part``-th of ``parts`` of tensor number ``index`` in ``TransferPlan.layers[group]``."""

    group: int
    index: int
    part: int
    parts: int


@dataclass(frozen=True)
class TransferPlan:
    """All transfers of a model, in the order of its layers.

    Attributes:
        layers: name prefix of each group of tensors (``"model.layers.0."``; ``""`` outside of layers) and the index of
            its template.
        limit: the most bytes that a rank sends, and the most that it receives, in one round.
    """

    layers: tuple[tuple[str, int], ...]
    templates: tuple[Template, ...]
    limit: int

    def tensors(self) -> Iterator[tuple[str, TensorPlan]]:
        """Yield the full name and the plan of every tensor, in the model's order."""
        for prefix, template in self.layers:
            for plan in self.templates[template].tensors:
                yield prefix + plan.tensor.name, plan

    def sum_bytes(
        self, is_counted: Callable[[TensorPlan, Transfer], bool], rank_of: Callable[[Transfer], int]
    ) -> dict[int, int]:
        """Add up the bytes of the transfers that ``is_counted`` selects, by the rank that ``rank_of`` returns."""
        count = [sum(index == i for _, index in self.layers) for i in range(len(self.templates))]
        totals: dict[int, int] = {}
        for template, times in zip(self.templates, count, strict=True):
            for plan in template.tensors:
                for transfer in plan.transfers:
                    if is_counted(plan, transfer):
                        nbytes = times * transfer.block.numel * plan.tensor.itemsize
                        totals[rank_of(transfer)] = totals.get(rank_of(transfer), 0) + nbytes
        return totals

    @cached_property
    def needed(self) -> dict[int, int]:
        """Bytes that each worker needs, whether it receives them or has them on its own rank."""
        return self.sum_bytes(lambda plan, transfer: True, lambda t: t.target)

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each worker receives from other ranks."""
        return self.sum_bytes(lambda plan, transfer: not plan.is_local(transfer), lambda t: t.target)

    @cached_property
    def sent(self) -> dict[int, int]:
        """Bytes that each trainer rank sends to other ranks."""
        return self.sum_bytes(lambda plan, transfer: not plan.is_local(transfer), lambda t: t.source)

    @cached_property
    def min_limit(self) -> tuple[int, str]:
        """The smallest ``limit`` in bytes with which rounds exist, and the name of the tensor that requires it."""
        plans = [plan for template in self.templates for plan in template.tensors]
        return max((plan.max_rank_bytes(0, plan.max_parts), plan.tensor.name) for plan in plans)

    def between_nodes(
        self, node_of_source: Callable[[int], int], node_of_target: Callable[[int], int]
    ) -> dict[int, int]:
        """Return the bytes that each worker receives from other nodes."""
        return self.sum_bytes(
            lambda plan, t: not plan.is_local(t) and node_of_source(t.source) != node_of_target(t.target),
            lambda t: t.target,
        )

    @cached_property
    def rounds(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each round in the model's order; no rank sends or receives more than ``limit`` bytes.

        Nor does a rank keep more, because it holds a copy of its shards where they are merged or quantised; but what it
        keeps of a tensor is not divided further for that.
        """
        divided = [[plan.divided(self.limit) for plan in template.tensors] for template in self.templates]
        rounds: list[tuple[Piece, ...]] = []
        pieces: list[Piece] = []
        load: dict[End, int] = {}
        for group, (_, template) in enumerate(self.layers):
            for index, (parts, runs) in enumerate(divided[template]):
                for first, last, nbytes in runs:
                    while first < last:
                        room = ((self.limit - load.get(end, 0)) // more for end, more in nbytes.items())
                        fitting = min([last - first, *room])
                        if fitting < 1 and pieces:
                            rounds.append(tuple(pieces))
                            pieces, load = [], {}
                            continue
                        fitting = max(1, fitting)
                        pieces += [Piece(group, index, part, parts) for part in range(first, first + fitting)]
                        for end, more in nbytes.items():
                            load[end] = load.get(end, 0) + fitting * more
                        first += fitting
        return (*rounds, tuple(pieces)) if pieces else tuple(rounds)

    def tensor(self, piece: Piece) -> tuple[str, TensorPlan]:
        """Return the full name and the plan of a piece's tensor."""
        prefix, template = self.layers[piece.group]
        plan = self.templates[template].tensors[piece.index]
        return prefix + plan.tensor.name, plan

    def transfers(self, piece: Piece) -> Iterator[Transfer]:
        """Yield a piece's transfers, local ones included, in the same order on every rank."""
        for transfer in self.tensor(piece)[1].transfers:
            part = transfer.part(piece.part, piece.parts)
            if part is not None:
                yield part

    def digest(self) -> str:
        """Return a hash that is equal on two ranks exactly when all their transfers and rounds are."""
        facts = [
            [
                [p.tensor.name, p.tensor.shape, p.tensor.itemsize, p.colocated]
                + [[t.block.low, t.block.high, t.source, t.target] for t in p.transfers]
                for p in template.tensors
            ]
            for template in self.templates
        ]
        data = json.dumps([self.limit, self.layers, facts], separators=(",", ":"))
        return hashlib.blake2b(data.encode(), digest_size=16).hexdigest()


def make_transfer_plan(
    tensors: Iterable[TensorSpec],
    layers: Sequence[str],
    topology: TrainerTopology,
    targets: Targets,
    slices_of: Callable[[TensorSpec, int], Sequence[TargetSlice]],
    limit: int,
) -> TransferPlan:
    """Plan the transfers of a model.

    Args:
        tensors: in the model's order.
        layers: FQNs of the layers; layers with equal tensors are planned once.
        slices_of: returns the slices of a tensor that a worker (index in ``range(targets.count)``) keeps. Their blocks
            have to be the same in layers with equal tensors.
        limit: the most bytes that a rank sends, and the most that it receives, in one round.
    """
    groups: list[tuple[str, list[TensorSpec]]] = []
    for tensor in tensors:
        prefix = next((f"{fqn}." for fqn in layers if tensor.name.startswith(f"{fqn}.")), "")
        if not groups or groups[-1][0] != prefix:
            groups.append((prefix, []))
        groups[-1][1].append(tensor)

    templates: dict[tuple[TensorSpec, ...], int] = {}
    made: list[Template] = []
    order: list[tuple[str, int]] = []
    for prefix, members in groups:
        inside = tuple(TensorSpec(t.name.removeprefix(prefix), t.shape, t.itemsize, t.cuts) for t in members)
        if inside not in templates:
            templates[inside] = len(made)
            plans = [
                _plan_tensor(short, topology, targets, [slices_of(full, worker) for worker in range(targets.count)])
                for short, full in zip(inside, members, strict=True)
            ]
            made.append(Template(tuple(plans)))
        order.append((prefix, templates[inside]))
    return TransferPlan(tuple(order), tuple(made), limit)


def _plan_tensor(
    tensor: TensorSpec, topology: TrainerTopology, targets: Targets, slices_by_worker: Sequence[Sequence[TargetSlice]]
) -> TensorPlan:
    grid = _Grid(holders(tensor, topology))
    transfers = []
    for target, slices in enumerate(slices_by_worker):
        for part in dict.fromkeys(part.block for part in slices):  # a worker may keep a block in several places
            for block, ranks in grid.overlapping(part):
                source = _source(ranks, target, topology, targets.colocated)
                transfers.append(Transfer(block, source, target))
    return TensorPlan(tensor, tuple(sorted(transfers)), targets.colocated)


def _source(ranks: Sequence[int], target: int, topology: TrainerTopology, colocated: bool) -> int:
    """Choose the source among the ranks that hold a block.

    Colocated, it is the target's own rank where that holds the block, and otherwise a rank of the same trainer replica,
    in rotation; separate workers rotate over replicas as well.
    """
    if colocated:
        replica, rank = divmod(target, topology.fsdp)
        return replica * topology.fsdp + (rank if rank in ranks else ranks[rank % len(ranks)])
    replica = target % topology.dp_replicate
    return replica * topology.fsdp + ranks[target // topology.dp_replicate % len(ranks)]


class _Grid:
    """The grid into which shards divide a tensor; finds the cells that overlap a block without a search."""

    def __init__(self, blocks: dict[IndexRange, list[int]]):
        dims = range(len(next(iter(blocks)).low))
        self._spans = [sorted({(block.low[d], block.high[d]) for block in blocks}) for d in dims]
        self._ranks = {block.low: ranks for block, ranks in blocks.items()}

    def overlapping(self, block: IndexRange) -> Iterator[tuple[IndexRange, list[int]]]:
        """Yield the intersection of ``block`` with each cell, and the ranks that hold the cell."""
        corners: list[tuple[tuple[int, int], ...]] = [()]
        for spans, low, high in zip(self._spans, block.low, block.high, strict=True):
            touched = [span for span in spans if span[0] < high and low < span[1]]
            corners = [(*corner, span) for corner in corners for span in touched]
        for corner in corners:
            cell = IndexRange(tuple(low for low, _ in corner), tuple(high for _, high in corner))
            shared = cell.intersection(block)
            if shared is not None:
                yield shared, self._ranks[cell.low]


def _split_dim(shape: tuple[int, ...], parts: int) -> int:
    return next((d for d, size in enumerate(shape) if size >= parts), shape.index(max(shape)))


def _part_numel(shape: tuple[int, ...], part: int, parts: int) -> int:
    """Return the elements of a block's part (``Transfer.part``)."""
    if not shape:
        return int(part == 0)
    dim = _split_dim(shape, parts)
    start, stop = chunk_range(0, shape[dim], parts, part)
    return math.prod(shape[:dim]) * (stop - start) * math.prod(shape[dim + 1 :])
