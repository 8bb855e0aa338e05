"""Who sends what to whom when weights go to the rollout, in rounds of bounded size.

A plan is a pure function of two placements (``vllm_layout.py``), so both sides compute it for themselves and compare
digests. Layers that are alike share one plan, a *template*: planning a model of 94 layers for 64 ranks takes seconds.

A round is a list of *pieces*: the ``part``-th of ``parts`` of a tensor, where every transfer of that tensor is divided
alike. So the bytes of a round are spread over ranks as those of the whole tensor are, and every rank takes part in
every round, whether it has something to send or not.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...engine.topology.index_ranges import IndexRange, chunk_range
from .vllm_layout import Need, Tensor, Topology, holders

__all__ = ["ROUND_BUFFERS", "Piece", "Plan", "Targets", "Template", "Transfer", "make_plan", "round_bytes"]

# Two that a rank sends from, two that it receives into, and what it casts of its own meanwhile.
ROUND_BUFFERS = 5


def round_bytes(memory_bytes: int) -> int:
    """What a rank may send, and receive, in one round, so that all that it holds for the rounds is within a bound."""
    return memory_bytes // ROUND_BUFFERS


@dataclass(frozen=True, order=True)
class Transfer:
    """A box of a tensor that goes from trainer rank ``source`` to ``target``."""

    box: IndexRange
    source: int
    target: int

    def part(self, part: int, parts: int) -> "Transfer | None":
        """The ``part``-th of ``parts`` of this, cut along the first dim that is long enough; ``None`` if empty."""
        shape = self.box.shape
        if not shape:
            return self if part == 0 else None
        dim = next((d for d, size in enumerate(shape) if size >= parts), shape.index(max(shape)))
        start, stop = chunk_range(self.box.low[dim], self.box.high[dim], parts, part)
        return Transfer(self.box.with_dim(dim, start, stop), self.source, self.target) if start < stop else None


@dataclass(frozen=True)
class Targets:
    """Who receives.

    Args:
        count: workers of the rollout, over all its replicas.
        colocated: worker ``i`` is fed by trainer rank ``i``, in its process or beside it; what that rank holds itself
            does not travel. Otherwise the workers are other processes.
    """

    count: int
    colocated: bool = True


@dataclass(frozen=True)
class TensorPlan:
    """The transfers of one tensor, local ones (``source == target`` where colocated) included."""

    tensor: Tensor
    transfers: tuple[Transfer, ...]
    colocated: bool

    def is_local(self, transfer: Transfer) -> bool:
        return self.colocated and transfer.source == transfer.target

    @property
    def travelling(self) -> Iterator[Transfer]:
        return (t for t in self.transfers if not self.is_local(t))

    def largest_load(self, part: int = 0, parts: int = 1) -> int:
        """Most bytes that one rank sends, or one receives, for this part."""
        sent, received = self.loads(part, parts)
        return max([*sent.values(), *received.values(), 0])

    def loads(self, part: int = 0, parts: int = 1) -> tuple[dict[int, int], dict[int, int]]:
        """Bytes sent, by source, and received, by target."""
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        for transfer in self.travelling:
            piece = transfer.part(part, parts)
            if piece is not None:
                nbytes = piece.box.numel * self.tensor.itemsize
                sent[piece.source] = sent.get(piece.source, 0) + nbytes
                received[piece.target] = received.get(piece.target, 0) + nbytes
        return sent, received

    @property
    def finest(self) -> int:
        """In how many parts the tensor can be sent at most."""
        return max((max(t.box.shape, default=1) for t in self.travelling), default=1)

    def parts_within(self, limit: int) -> int:
        """How many parts the tensor is to be sent in, so that no rank sends or receives more than ``limit`` bytes.

        Rather a quarter of that, so that rounds can be filled.

        Raises:
            ValueError: if one row of it is more than ``limit``.
        """
        finest = self.finest
        parts = min(finest, max(1, -(-4 * self.largest_load() // limit)))
        while (load := self.largest_load(0, parts)) > limit / 4 and parts < finest:  # the first part is the largest
            parts = min(finest, parts + max(1, parts // 8))
        if load > limit:
            raise ValueError(
                f"one row of {self.tensor.name} {list(self.tensor.shape)} is {load} bytes on a rank, more than the "
                f"{limit} bytes that a round may have."
            )
        return parts


@dataclass(frozen=True)
class Template:
    """What layers that are alike have in common: their tensors, by the name inside the layer."""

    tensors: tuple[TensorPlan, ...]


@dataclass(frozen=True)
class Piece:
    """The ``part``-th of ``parts`` of a tensor: the ``index``-th of the ``group``-th of ``Plan.layers``."""

    group: int
    index: int
    part: int
    parts: int


@dataclass(frozen=True)
class Plan:
    """All transfers of a model, in the order of its layers.

    Attributes:
        layers: prefix of each group of tensors (``"model.layers.0."``, ``""`` for what is in no layer), and the index
            of its template.
        limit: bytes that a rank sends, and receives, at most in one round.
    """

    layers: tuple[tuple[str, int], ...]
    templates: tuple[Template, ...]
    limit: int

    def tensors(self) -> Iterator[tuple[str, TensorPlan]]:
        """Every tensor's full name and plan, in order."""
        for prefix, template in self.layers:
            for plan in self.templates[template].tensors:
                yield prefix + plan.tensor.name, plan

    def total(self, amount: Callable[[TensorPlan, Transfer], bool], of: Callable[[Transfer], int]) -> dict[int, int]:
        """Bytes of the transfers that ``amount`` picks, added up by the rank that ``of`` gives."""
        count = [sum(index == i for _, index in self.layers) for i in range(len(self.templates))]
        totals: dict[int, int] = {}
        for template, times in zip(self.templates, count, strict=True):
            for plan in template.tensors:
                for transfer in plan.transfers:
                    if amount(plan, transfer):
                        nbytes = times * transfer.box.numel * plan.tensor.itemsize
                        totals[of(transfer)] = totals.get(of(transfer), 0) + nbytes
        return totals

    @cached_property
    def needed(self) -> dict[int, int]:
        """Bytes that each worker takes."""
        return self.total(lambda plan, transfer: True, lambda t: t.target)

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that reach each worker from elsewhere."""
        return self.total(lambda plan, transfer: not plan.is_local(transfer), lambda t: t.target)

    @cached_property
    def sent(self) -> dict[int, int]:
        """Bytes that each trainer rank sends."""
        return self.total(lambda plan, transfer: not plan.is_local(transfer), lambda t: t.source)

    @cached_property
    def least_limit(self) -> tuple[int, str]:
        """The smallest limit with which the rounds can be made, and the tensor whose row is that large."""
        plans = [plan for template in self.templates for plan in template.tensors]
        return max((plan.largest_load(0, plan.finest), plan.tensor.name) for plan in plans)

    def between_nodes(
        self, node_of_source: Callable[[int], int], node_of_target: Callable[[int], int]
    ) -> dict[int, int]:
        """Bytes that reach each worker from another node."""
        return self.total(
            lambda plan, t: not plan.is_local(t) and node_of_source(t.source) != node_of_target(t.target),
            lambda t: t.target,
        )

    @cached_property
    def rounds(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each round, in the order of the model; no rank sends or receives more than ``limit`` in one."""
        parts = [[plan.parts_within(self.limit) for plan in template.tensors] for template in self.templates]
        loads = [
            [[plan.loads(i, n) for i in range(n)] for plan, n in zip(template.tensors, each, strict=True)]
            for template, each in zip(self.templates, parts, strict=True)
        ]
        rounds: list[tuple[Piece, ...]] = []
        pieces: list[Piece] = []
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        for group, (_, template) in enumerate(self.layers):
            for index, by_part in enumerate(loads[template]):
                for part, (out, in_) in enumerate(by_part):
                    if pieces and (self._exceeds(sent, out) or self._exceeds(received, in_)):
                        rounds.append(tuple(pieces))
                        pieces, sent, received = [], {}, {}
                    pieces.append(Piece(group, index, part, len(by_part)))
                    _add(sent, out)
                    _add(received, in_)
        return (*rounds, tuple(pieces)) if pieces else tuple(rounds)

    def _exceeds(self, so_far: dict[int, int], more: dict[int, int]) -> bool:
        return any(so_far.get(rank, 0) + nbytes > self.limit for rank, nbytes in more.items())

    def tensor(self, piece: Piece) -> tuple[str, TensorPlan]:
        """The full name and the plan of the tensor that a piece is of."""
        prefix, template = self.layers[piece.group]
        plan = self.templates[template].tensors[piece.index]
        return prefix + plan.tensor.name, plan

    def transfers(self, piece: Piece) -> Iterator[Transfer]:
        """What travels or stays for a piece, in an order that both sides share."""
        for transfer in self.tensor(piece)[1].transfers:
            part = transfer.part(piece.part, piece.parts)
            if part is not None:
                yield part

    def digest(self) -> str:
        """Equal for equal plans; sides that compare it agree on every transfer and every round."""
        facts = [
            [
                [p.tensor.name, p.tensor.shape, p.tensor.itemsize, p.colocated]
                + [[t.box.low, t.box.high, t.source, t.target] for t in p.transfers]
                for p in template.tensors
            ]
            for template in self.templates
        ]
        data = json.dumps([self.limit, self.layers, facts], separators=(",", ":"))
        return hashlib.blake2b(data.encode(), digest_size=16).hexdigest()


def make_plan(
    tensors: Iterable[Tensor],
    layers: Sequence[str],
    topology: Topology,
    targets: Targets,
    needs_of: Callable[[Tensor, int], Sequence[Need]],
    limit: int,
) -> Plan:
    """Plan the transfers of a model.

    Args:
        tensors: in the model's order.
        layers: FQNs of its layers; what has the same tensors in two layers is planned once.
        needs_of: what a worker (index in ``range(targets.count)``) takes of a tensor. For tensors of layers only what
            comes after the layer's name may matter.
        limit: bytes that a rank sends, and receives, at most in one round.
    """
    groups: list[tuple[str, list[Tensor]]] = []
    for tensor in tensors:
        prefix = next((f"{fqn}." for fqn in layers if tensor.name.startswith(f"{fqn}.")), "")
        if not groups or groups[-1][0] != prefix:
            groups.append((prefix, []))
        groups[-1][1].append(tensor)

    templates: dict[tuple[Tensor, ...], int] = {}
    made: list[Template] = []
    order: list[tuple[str, int]] = []
    for prefix, members in groups:
        inside = tuple(Tensor(t.name.removeprefix(prefix), t.shape, t.itemsize, t.cuts) for t in members)
        if inside not in templates:
            templates[inside] = len(made)
            plans = [
                _plan_tensor(short, topology, targets, [needs_of(full, worker) for worker in range(targets.count)])
                for short, full in zip(inside, members, strict=True)
            ]
            made.append(Template(tuple(plans)))
        order.append((prefix, templates[inside]))
    return Plan(tuple(order), tuple(made), limit)


def _plan_tensor(tensor: Tensor, topology: Topology, targets: Targets, needs: Sequence[Sequence[Need]]) -> TensorPlan:
    grid = _Grid(holders(tensor, topology))
    transfers = []
    for target, wanted in enumerate(needs):
        for need in wanted:
            for box, ranks in grid.overlapping(need.box):
                source = _source(ranks, target, topology, targets.colocated)
                transfers.append(Transfer(box, source, target))
    return TensorPlan(tensor, tuple(sorted(transfers)), targets.colocated)


def _source(ranks: Sequence[int], target: int, topology: Topology, colocated: bool) -> int:
    """Of the ranks that hold a box: itself, else one of the target's own replica of the trainer, all in turn."""
    if colocated:
        replica, rank = divmod(target, topology.fsdp)
        return replica * topology.fsdp + (rank if rank in ranks else ranks[rank % len(ranks)])
    replica = target % topology.dp_replicate
    return replica * topology.fsdp + ranks[target // topology.dp_replicate % len(ranks)]


class _Grid:
    """Boxes that cut a tensor into rows and columns, so that those which overlap a box are found without a search."""

    def __init__(self, boxes: dict[IndexRange, list[int]]):
        dims = range(len(next(iter(boxes)).low))
        self._spans = [sorted({(box.low[d], box.high[d]) for box in boxes}) for d in dims]
        self._ranks = {box.low: ranks for box, ranks in boxes.items()}

    def overlapping(self, box: IndexRange) -> Iterator[tuple[IndexRange, list[int]]]:
        """What ``box`` shares with each cell, and who holds that."""
        corners: list[tuple[tuple[int, int], ...]] = [()]
        for spans, low, high in zip(self._spans, box.low, box.high, strict=True):
            touched = [span for span in spans if span[0] < high and low < span[1]]
            corners = [(*corner, span) for corner in corners for span in touched]
        for corner in corners:
            cell = IndexRange(tuple(low for low, _ in corner), tuple(high for _, high in corner))
            shared = cell.intersection(box)
            if shared is not None:
                yield shared, self._ranks[cell.low]


def _add(totals: dict[int, int], more: dict[int, int]) -> None:
    for rank, nbytes in more.items():
        totals[rank] = totals.get(rank, 0) + nbytes
