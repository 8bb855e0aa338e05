"""Plans a weight sync: which tensors go to the workers in which round, and how many bytes each rank moves.

Every rank computes the plan on its own, from the layouts of trainer and rollout, and ranks compare digests of these.
The cost grows linearly with the ranks: workers of the same kind keep the same, however many there are, and what ranks
send is computed for all of them at once (``senders.py``). Layers with the same tensors share a *template*. Each rank
computes for itself which bytes it sends where, and where it puts those that it receives (``routes.py``).

A round sends bundles of parameters (``parameters.py``), and has bundles of one layer only, so that the rounds of all
layers with a template are alike. Every rank takes part in every round, whether or not it has anything to send.
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

# What a rank sends, what it receives, its worker's parameters, its own values, and the positions of all these.
ROUND_BUFFERS = 5
# One more bundle makes the run of a round, of which its messages are multiples, no shorter than this.
_LONG_RUN = 512
_TRIED_PARTS = 32


class RoundTooSmallError(ValueError):
    """A round can't hold what can't be divided, and has ``needed`` bytes."""

    def __init__(self, what: str, needed: int, limit: int):
        super().__init__(f"{what} is {needed} bytes on a rank, more than the {limit} bytes that a round may hold.")
        self.what, self.needed = what, needed


def round_bytes(memory_bytes: int, in_full: bool = False) -> int:
    """Return the bytes that a rank may send, and receive, per round so that all its buffers fit ``memory_bytes``.

    In full there are beside the buffers a tensor in memory of its own, and a copy of it in a checkpoint's layout; but
    what a rank sends and its own values are parts of what it receives, and one buffer together.
    """
    return memory_bytes // (ROUND_BUFFERS + in_full)


@dataclass(frozen=True)
class Targets:
    """The receiving workers."""

    kinds: tuple[int, ...]  # of each worker, e.g. its index in its replica; workers of a kind keep the same
    replicas: tuple[int, ...]  # for each worker the trainer replica that sends to it
    are_separate: bool  # whether they are in processes of their own, which follow the trainer's in one group

    @classmethod
    def colocated(cls, topology: Topology, workers: int) -> "Targets":
        """Describe one worker beside each trainer rank, in replicas of so many workers."""
        ranks = range(topology.world)
        return cls(tuple(rank % workers for rank in ranks), tuple(rank // topology.fsdp for rank in ranks), False)

    @classmethod
    def separate(cls, kinds: Sequence[int], topology: Topology) -> "Targets":
        """Describe workers in processes of their own, to which the trainer's replicas send in turn."""
        return cls(tuple(kinds), tuple(i % topology.dp_replicate for i in range(len(kinds))), True)

    @cached_property
    def are_gathered(self) -> bool:
        """Whether every rank's worker keeps the whole model: then ranks gather instead of exchanging."""
        return not self.are_separate and not any(self.kinds)

    @cached_property
    def count(self) -> Ints:
        """The workers of each kind that each trainer replica sends to, ``[replicas, kinds]``."""
        found = np.zeros((max(self.replicas, default=0) + 1, max(self.kinds, default=0) + 1), dtype=np.int64)
        np.add.at(found, (list(self.replicas), list(self.kinds)), 1)
        return found


@dataclass(frozen=True)
class Share:
    """What a round sends of a bundle: to each worker the ``part``-th of ``parts`` of what it keeps."""

    bundle: Bundle
    part: int = 0
    parts: int = 1
    is_whole: bool = False  # whether it sends the tensors whole to every worker instead

    @property
    def run(self) -> Run:
        if self.is_whole:
            return 0, {}
        return self.bundle.run if self.parts == 1 else self.bundle.run_of_parts

    def part_of(self, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """Return the shape of this part of memory that is divided along ``dim``."""
        if self.parts == 1:
            return shape
        return (*shape[:dim], len(range(self.part, shape[dim], self.parts)), *shape[dim + 1 :])


@dataclass(frozen=True, eq=False)
class Round:
    """What a round sends."""

    shares: tuple[Share, ...]  # those sent whole are the last

    @cached_property
    def unit(self) -> int:
        """Bytes of which everything in this round's messages is a multiple."""
        run = math.gcd(*(share.run[0] for share in self.shares)) or ALIGNMENT
        # What is sent whole is padded to it.
        return run if not self.shares[-1].is_whole else max(d for d in range(1, min(run, 4096) + 1) if run % d == 0)

    @cached_property
    def word(self) -> int:
        """Bytes of which all elements and offsets of what is sent whole are multiples."""
        return math.gcd(self.unit, *(self.specs[i].itemsize for i in self.whole_offsets[0]))

    @cached_property
    def specs(self) -> dict[int, TensorSpec]:
        """The tensors that it sends, by their numbers in the group, in an order that all ranks share."""
        found = {i: share.bundle.specs[i] for share in self.shares for i in share.bundle.tensors}
        return dict(sorted(found.items()))

    @property
    def alignment(self) -> int:
        """Bytes of which offsets in this round's buffers are multiples."""
        return math.lcm(self.unit, ALIGNMENT)

    @cached_property
    def whole_offsets(self) -> tuple[dict[int, int], int]:
        """Where a rank's part of each tensor that is sent whole begins, and the bytes of all."""
        sizes = [item for share in self.shares if share.is_whole for item in share.bundle.whole_sizes.items()]
        *starts, end = itertools.accumulate((size for _, size in sizes), initial=0)
        return dict(zip((i for i, _ in sizes), starts, strict=True)), -(-end // self.alignment) * self.alignment


@dataclass(frozen=True)
class Template:
    """What layers with the same tensors share; names are relative to the layer."""

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
        """Bytes that a replica's ranks send to a worker of each kind, also to their own, ``[ranks, kinds]``."""
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
        """Return a hash that two ranks share exactly when they plan from the same facts, and so the same rounds."""
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
        layers: FQNs of the layers; layers with equal tensors are planned once.
        slices_of: returns the slices of a tensor that a worker of a kind keeps. Their blocks have to be the same in
            layers with equal tensors.
        limit: the most bytes that a rank sends, and the most that it receives, in one round.
        may_split: tells by name whether a tensor may be sent in parts.
        by_name: whether whole tensors are sent, of experts some at a time. What can't be divided enough exceeds the
            limit then.

    Raises:
        RoundTooSmallError: a row of a parameter, or a parameter that can't be divided by rows, exceeds the limit.
    """
    groups: list[tuple[str, list[TensorSpec]]] = []
    known = frozenset(layers)
    of_layer: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        prefix = _layer_of(tensor.name, known)
        # Buffers come after all parameters, and are sent with those of their layer.
        if prefix not in of_layer or (not prefix and groups[-1][0]):
            of_layer[prefix] = []
            groups.append((prefix, of_layer[prefix]))
        of_layer[prefix].append(tensor)

    templates: dict[tuple[TensorSpec, ...], Template] = {}
    order: list[tuple[str, tuple[TensorSpec, ...]]] = []
    kinds = range(targets.count.shape[1])
    nothing = _Load(targets, np.zeros((topology.fsdp, len(kinds)), dtype=np.int64))
    senders = cache(partial(senders_of, topology=topology))  # of tensors without their names
    for prefix, members in groups:
        inside = tuple(replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in members)
        order.append((prefix, inside))
        if inside not in templates:
            slices = [[slices_of(full, kind) for full in members] for kind in kinds]
            splits = [may_split(full.name) for full in members]
            held = [senders(replace(tensor, name="")) for tensor in inside]
            bundles = bundles_of(inside, held, slices, splits, by_name)
            templates[inside] = Template(inside, tuple(bundles), tuple(_rounds(bundles, nothing, limit, not by_name)))
    numbers = {inside: number for number, inside in enumerate(templates)}
    in_order = tuple((prefix, numbers[inside]) for prefix, inside in order)
    return TransferPlan(in_order, tuple(templates.values()), topology, targets, limit)


def _layer_of(name: str, layers: Collection[str]) -> str:
    """Return the prefix of the outermost layer that a tensor belongs to."""
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
        if self.targets.are_gathered:  # messages are as long as the longest
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
    # Bundles that are sent whole can't be divided, and have positions of their words beside them.
    whole = [b for b in bundles if b.is_short and nothing.plus(Share(b, is_whole=True)).most <= limit // 16]
    # From long runs to short ones, so that few bundles shorten the run of the one before. What is not sharded comes
    # after: scales, which a rank knows when it has quantised their weights.
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
    """Return the fewest parts in which no rank moves more than ``limit`` bytes of a bundle, or those of least bytes."""

    def most(parts: int) -> int:
        # Parts have the same rows but for one: of many parts, a few tell enough.
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
