"""Plans a weight sync: the tensors of each round, and the bytes that each rank moves.

Every rank plans alone, from the layouts of trainer and rollout, and ranks compare digests. The cost is linear in the
ranks: workers of a kind keep the same slices, and ``senders.py`` computes all ranks at once. Each rank computes its own
positions (``routes.py``).

A round sends bundles of parameters (``parameters.py``) of one layer. Layers with the same tensors share a *template*,
and so have the same rounds. All ranks join every round, even with nothing to send.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import numpy as np

from ...engine.topology.mesh import Topology
from ..layout.specs import TargetSlice, TensorSpec
from .parameters import ALIGNMENT, Bundle, Run, bundles_of
from .senders import Ints, senders_of

__all__ = ["ROUND_BUFFERS", "Round", "RoundTooSmallError", "Share", "Targets", "Template", "TransferPlan"]
__all__ += ["make_transfer_plan", "round_bytes"]

ROUND_BUFFERS = 5  # sent messages, received messages, the worker's parameters, the rank's own values, positions
# A bundle joins a round if their common run has this many bytes, or shortens neither run.
_LONG_RUN = 512
_TRIED_PARTS = 32


class RoundTooSmallError(ValueError):
    """A piece that can't be divided has ``needed`` bytes, more than a round may hold."""

    def __init__(self, what: str, needed: int, limit: int):
        super().__init__(f"{what} is {needed} bytes on a rank, more than the {limit} bytes that a round may hold.")
        self.what, self.needed = what, needed


def round_bytes(memory_bytes: int, in_full: bool = False) -> int:
    """Return the bytes that a rank may send, and receive, per round so that all its buffers fit ``memory_bytes``.

    Mode ``full`` also copies and converts a tensor; its messages and own values share a buffer.
    """
    return memory_bytes // (ROUND_BUFFERS + in_full)


@dataclass(frozen=True)
class Targets:
    """The receiving workers."""

    kinds: tuple[int, ...]  # of each worker, e.g. its index in its replica; workers of a kind keep the same slices
    replicas: tuple[int, ...]  # for each worker the trainer replica that sends to it
    are_separate: bool  # whether they are other processes, which follow the trainer's in one group

    @classmethod
    def colocated(cls, topology: Topology, workers: int) -> "Targets":
        """Describe one worker beside each trainer rank, in replicas of ``workers`` workers."""
        ranks = range(topology.world)
        return cls(tuple(rank % workers for rank in ranks), tuple(rank // topology.fsdp for rank in ranks), False)

    @classmethod
    def separate(cls, kinds: Sequence[int], topology: Topology) -> "Targets":
        """Describe workers in other processes, to which the trainer's replicas send in turn."""
        return cls(tuple(kinds), tuple(i % topology.dp_replicate for i in range(len(kinds))), True)

    @cached_property
    def are_gathered(self) -> bool:
        """Whether every rank's worker keeps the whole model, so that rounds are all-gathers."""
        return not self.are_separate and not any(self.kinds)

    @cached_property
    def count(self) -> Ints:
        """The workers of each kind that each trainer replica sends to, ``[replicas, kinds]``."""
        found = np.zeros((max(self.replicas, default=0) + 1, max(self.kinds, default=0) + 1), dtype=np.int64)
        np.add.at(found, (list(self.replicas), list(self.kinds)), 1)
        return found


@dataclass(frozen=True)
class Share:
    """The ``part``-th of ``parts`` of a bundle: every ``parts``-th index of each worker's parameters."""

    bundle: Bundle
    part: int = 0
    parts: int = 1
    is_whole: bool = False  # whether all workers get the whole tensors instead of their slices

    @property
    def run(self) -> Run:
        if self.is_whole:
            return 0, {}
        return self.bundle.run if self.parts == 1 else self.bundle.run_of_parts

    def part_of(self, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """Return the shape of this part of memory divided along ``dim``."""
        if self.parts == 1:
            return shape
        return (*shape[:dim], len(range(self.part, shape[dim], self.parts)), *shape[dim + 1 :])


@dataclass(frozen=True, eq=False)
class Round:
    """The shares of one collective."""

    shares: tuple[Share, ...]  # whole ones last

    @cached_property
    def unit(self) -> int:
        """Bytes of a row; rows are gathered, and messages consist of them."""
        run = math.gcd(*(share.run[0] for share in self.shares)) or ALIGNMENT
        # Whole tensors are padded to the unit, so it is at most 4096 with them.
        return run if not self.shares[-1].is_whole else max(d for d in range(1, min(run, 4096) + 1) if run % d == 0)

    @cached_property
    def word(self) -> int:
        """Bytes that divide all elements and offsets of whole tensors."""
        return math.gcd(self.unit, *(self.specs[i].itemsize for i in self.whole_offsets[0]))

    @cached_property
    def specs(self) -> dict[int, TensorSpec]:
        """The tensors of this round by their numbers in the group, in one order on all ranks."""
        found = {i: share.bundle.specs[i] for share in self.shares for i in share.bundle.tensors}
        return dict(sorted(found.items()))

    @property
    def alignment(self) -> int:
        """Bytes that divide the offsets in this round's buffers."""
        return math.lcm(self.unit, ALIGNMENT)

    @cached_property
    def whole_offsets(self) -> tuple[dict[int, int], int]:
        """The offset of a rank's part of each whole tensor, and the bytes of all parts."""
        sizes = [item for share in self.shares if share.is_whole for item in share.bundle.whole_sizes.items()]
        *starts, end = itertools.accumulate((size for _, size in sizes), initial=0)
        return dict(zip((i for i, _ in sizes), starts, strict=True)), -(-end // self.alignment) * self.alignment


@dataclass(frozen=True)
class Template:
    """The rounds of all layers with the same tensors; names are relative to the layer."""

    tensors: tuple[TensorSpec, ...]
    bundles: tuple[Bundle, ...]
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class TransferPlan:
    """All rounds of a sync, in the order of the model's layers."""

    # The name prefix of each group of tensors (``"model.layers.0."``; ``""`` outside of layers) and its template.
    layers: tuple[tuple[str, int], ...]
    templates: tuple[Template, ...]
    topology: Topology
    targets: Targets
    limit: int

    @property
    def rounds(self) -> Iterator[tuple[str, Round]]:
        """All rounds, each with the prefix of its tensors' names."""
        return ((prefix, round_) for prefix, t in self.layers for round_ in self.templates[t].rounds)

    @cached_property
    def sent(self) -> Ints:
        """Bytes that a replica's ranks send to a worker of each kind, their own included, ``[ranks, kinds]``."""
        found = np.zeros((self.topology.fsdp, self.targets.count.shape[1]), dtype=np.int64)
        times = np.bincount([template for _, template in self.layers], minlength=len(self.templates))
        for count, template in zip(times, self.templates, strict=True):
            for bundle in template.bundles:
                found += count * bundle.sent()
        return found

    @property
    def most_sent(self) -> int:
        """The most bytes that a rank of any replica sends."""
        return int((self.sent @ self.targets.count.T).max(initial=0))

    @property
    def needed(self) -> Ints:
        """Bytes that a worker of each kind needs, ``[kinds]``."""
        return self.sent.sum(axis=0)

    def digest(self) -> str:
        """Return a hash that is equal on two ranks exactly if they plan the same rounds."""
        facts: list[object] = [self.limit, self.layers, self.targets]
        for template in self.templates:
            kinds = [of_kind for bundle in template.bundles for of_kind in bundle.by_kind]
            facts.append(template.tensors)
            facts.append([[(p.name, [region.part for region in p.regions]) for p in of_kind] for of_kind in kinds])
            facts.append([(len(r.shares), r.unit) for r in template.rounds])
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def make_transfer_plan(
    tensors: Iterable[TensorSpec],
    layers: Sequence[str],
    topology: Topology,
    targets: Targets,
    slices_of: Callable[[TensorSpec, int], Sequence[TargetSlice]],
    limit: int,
    may_split: Callable[[str], bool] = lambda name: True,
    by_name: bool = False,
) -> TransferPlan:
    """Plan a sync.

    Args:
        tensors: in the model's order.
        layers: FQNs; layers with equal tensors are planned once.
        slices_of: returns the slices of a tensor that a worker of a kind keeps; equal in layers with equal tensors.
        limit: the most bytes that a rank sends, and the most that it receives, in one round.
        may_split: whether the tensor of a name may be sent in parts.
        by_name: for mode ``full``: parts are whole experts, and pieces that can't be divided may exceed the limit.

    Raises:
        RoundTooSmallError: a row of a parameter, or a parameter that can't be divided by rows, exceeds the limit.
    """
    groups: list[tuple[str, list[TensorSpec]]] = []
    known = frozenset(layers)
    of_layer: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        prefix = _layer_of(tensor.name, known)
        # Buffers follow all parameters in the model's order, and are sent with their layer.
        if prefix not in of_layer or (not prefix and groups[-1][0]):
            of_layer[prefix] = []
            groups.append((prefix, of_layer[prefix]))
        of_layer[prefix].append(tensor)

    numbers: dict[tuple[TensorSpec, ...], int] = {}  # of templates, by their tensors
    templates: list[Template] = []
    order: list[tuple[str, int]] = []
    kinds = range(targets.count.shape[1])
    nothing = _Load(targets, np.zeros((topology.fsdp, len(kinds)), dtype=np.int64))
    senders = cache(partial(senders_of, topology=topology))  # of tensors without their names
    for prefix, members in groups:
        inside = tuple(replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in members)
        order.append((prefix, numbers.setdefault(inside, len(templates))))
        if numbers[inside] == len(templates):
            slices = [[slices_of(full, kind) for full in members] for kind in kinds]
            splits = [may_split(full.name) for full in members]
            held = [senders(replace(tensor, name="")) for tensor in inside]
            bundles = bundles_of(inside, held, slices, splits, by_name)
            rounds = _rounds(bundles, nothing, limit, not by_name)
            templates.append(Template(inside, tuple(bundles), tuple(rounds)))
    return TransferPlan(tuple(order), tuple(templates), topology, targets, limit)


def _layer_of(name: str, layers: Collection[str]) -> str:
    """Return the name prefix of a tensor's outermost layer."""
    ends = (end for end, character in enumerate(name) if character == ".")
    return next((name[: end + 1] for end in ends if name[:end] in layers), "")


@dataclass
class _Load:
    """The bytes that ranks move in a round."""

    targets: Targets
    sent: Ints  # by each rank to a worker of each kind, ``[ranks, kinds]``
    whole: int = 0  # by each rank to every worker

    @property
    def most(self) -> int:
        """The most bytes that any rank sends or receives."""
        ranks = len(self.sent)
        if self.targets.are_gathered:  # messages are padded to the longest
            return ranks * (int(self.sent.max(initial=0)) + self.whole)
        count = self.targets.count
        sent = (self.sent @ count.T).max(initial=0) + self.whole * count.sum(axis=1).max(initial=0)
        return int(max(sent, self.sent.sum(axis=0).max(initial=0) + self.whole * ranks))

    def plus(self, share: Share) -> "_Load":
        if share.is_whole:
            return replace(self, whole=self.whole + sum(share.bundle.whole_sizes.values()))
        return replace(self, sent=self.sent + share.bundle.sent(share.part, share.parts))


def _rounds(bundles: Sequence[Bundle], nothing: _Load, limit: int, must_fit: bool) -> Iterator[Round]:
    """Divide the bundles of a layer into rounds in which no rank sends or receives more than ``limit`` bytes."""
    shares: list[Share] = []
    load, run = nothing, 0
    # A whole bundle can't be divided, and its positions count words, which are many.
    whole = [b for b in bundles if b.is_short and nothing.plus(Share(b, is_whole=True)).most <= limit // 16]
    # From long runs to short ones, so that few bundles shorten a round's run. Unsharded tensors follow, because scales
    # exist only after their weights are quantised.
    for bundle in sorted(bundles, key=lambda b: (b in whole, not any(b.specs[i].cuts for i in b.tensors), -b.run[0])):
        parts = 1 if bundle in whole else _parts(bundle, nothing, limit, must_fit)
        for share in (Share(bundle, part, parts, bundle in whole) for part in range(parts)):
            own, more = share.run[0], load.plus(share)
            shared = math.gcd(run, own)
            if shares and (shared < min(run, own, _LONG_RUN) or more.most > limit):
                yield Round(tuple(shares))
                shares, more, shared = [], nothing.plus(share), own
            shares.append(share)
            load, run = more, shared
    if shares:
        yield Round(tuple(shares))


def _parts(bundle: Bundle, nothing: _Load, limit: int, must_fit: bool) -> int:
    """Return the fewest parts of a bundle with at most ``limit`` bytes on every rank, or the smallest parts."""

    def most(parts: int) -> int:
        # Parts differ by at most one row, so a sample of many parts is enough.
        tried = range(0, parts, max(1, parts // _TRIED_PARTS))
        return max(nothing.plus(Share(bundle, part, parts)).most for part in tried)

    parts = min(bundle.max_parts, max(1, -(-most(1) // limit)))
    needed, best = most(parts), parts
    while needed > limit and parts < bundle.max_parts:
        parts = min(bundle.max_parts, parts + max(1, parts // 8))
        if (less := most(parts)) < needed:
            needed, best = less, parts
    if needed > limit and must_fit:
        first = next(itertools.chain(*bundle.by_kind))
        what = f"{'one row' if bundle.max_parts > 1 else 'all'} of {first.name} {list(first.shape)}"
        raise RoundTooSmallError(what, needed, limit)
    return best
