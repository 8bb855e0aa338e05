"""Predict the memory of a training step on each rank, from sizes alone; ``benchmarks/memory.py`` measures it.

The shards and the optimizer's states are always in memory. Added to these is the maximum over the points of a step. In
each unit (embeddings, a layer, the head) one group of parameters is the largest. X is the part of it that a rank
computes with: of experts its own over ``ep``, gathered over ``ep_fsdp``. "Ahead" are the units that are prefetched.

- gathering, in forward and backward: a buffer of X for this unit and each ahead; the weights copied out of it, X; and a
  copy of these, X, if they are sharded along another dim than the first;
- computing forward: the buffers, which FSDP frees at the next unit, and the weights, X;
- computing gradients: the buffers ahead, the weights, X, and the gradients so far, up to X; X more for experts whose
  tokens are dispatched in chunks; and what experts recompute (``backward_memory.py``);
- packing gradients for the reduction: the buffers ahead; X of gradients (a copy, and the last parameter's own, if they
  are sharded along another dim than the first), and X packed;
- reducing: the buffers ahead; X packed; with several ranks, X that gloo copies and the rank's shard of the sum; the
  last parameter's gradient.

On a CPU the memory of experts' gradients is reused by the previous layer's (``moe/gemm/gradient_buffers.py``). In
backward there are also the gradients of the finished units, and the saved tensors of the others. Tensors that experts
save exist from the gather of the experts, in forward or in a recomputation, until their gradients are packed. A group
that no other rank shares is not gathered. Weights that are not freed after the forward stay until the backward, and are
not gathered again. With several micro-batches all gradients exist from the second on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..fsdp.options import ShardingOptions
from ..fsdp.wrap_plan import EMBEDDINGS, HEAD, ParamGroup, Unit
from ..moe.gemm.gradient_buffers import MIN_BYTES
from ..topology.mesh import Topology
from .activations import LayerActivations
from .model_sizes import ModelSizes, group_sizes

__all__ = ["IMBALANCE", "PlannerBackend", "Batch", "MemoryPoint", "OptimizerKind", "timeline", "peak"]

IMBALANCE = 1.2  # assumed if nothing is known of the routing
OptimizerKind = Literal["adamw", "muon"]


@dataclass(frozen=True)
class Batch:
    """What a rank computes in a step.

    Args:
        tokens: tokens of a micro-batch on one rank.
        micro_batches: number of micro-batches whose gradients are summed.
        imbalance: rows of the busiest rank's experts over the mean.
        sp: sequence-parallel size: ranks that share a micro-batch of ``sp`` times as many tokens.
    """

    tokens: int
    micro_batches: int = 1
    imbalance: float = 1.0
    sp: int = 1


@dataclass(frozen=True)
class PlannerBackend:
    """Properties of the device and the kernels that memory depends on.

    Args:
        on_cpu: gloo copies what it sends, and the memory of experts' gradients is kept until a backward ends.
        foreach: the optimizer uses foreach kernels, as it does without a fused one (``optim/multi_optimizer.py``).
    """

    on_cpu: bool = False
    foreach: bool = False


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes by part at one point of a step, on the rank with the most.

    ``buffers`` are gathered parameters, gradients before they are reduced, and temporaries of collectives and of the
    optimizer.
    """

    when: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0
    logits: int = 0

    @property
    def parts(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "when"}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def peak(*args: Any, **kwargs: Any) -> MemoryPoint:
    """Return the point of a step with the most memory; arguments as in ``timeline``."""
    return max(timeline(*args, **kwargs), key=lambda point: point.total)


def timeline(
    sizes: ModelSizes,
    topology: Topology,
    options: ShardingOptions,
    batch: Batch,
    optimizer: OptimizerKind | None = "adamw",
    backend: PlannerBackend = PlannerBackend(),
) -> Iterator[MemoryPoint]:
    """Yield the memory of a step at each point that may be its peak.

    Args:
        optimizer: None if its states are not known, which are not counted then.

    Raises:
        SettingError: the mesh would split an expert, or an explicit shard dim does not divide.
    """
    sizes.check(topology)
    step = _Step(sizes, topology, options, batch, backend)
    on_host = options.cpu_offload
    shards = step.trained_shards()
    parameters = 0 if on_host else sizes.whole + sum(step.shards())
    states = 0 if on_host else sum(_states(sizes, topology, options, optimizer))
    for i, unit in enumerate(sizes.units):
        done = sum(shards) if batch.micro_batches > 1 else sum(shards[i + 1 :])
        for when, gradients, buffers, kept in step.of_unit(i):
            logits = step.logits() if unit.name == HEAD and gradients else 0
            held = done if gradients and not on_host else sum(shards) if batch.micro_batches > 1 and not on_host else 0
            yield MemoryPoint(f"{unit.name}, {when}", parameters, held, states, buffers, kept, logits)
    if sizes.units[-1].name != HEAD:  # the root unit contains the head
        held = sum(shards) if batch.micro_batches > 1 and not on_host else 0
        yield MemoryPoint("logits", parameters, held, states, step.stays[-1], step.all_activations(), step.logits())
    if not on_host:
        temporary = max(_by_kind(sizes, step.trained_shard)) if backend.foreach else 0
        yield MemoryPoint("optimizer", parameters, sum(shards), states, temporary)


class _Step:
    def __init__(
        self, sizes: ModelSizes, topology: Topology, options: ShardingOptions, batch: Batch, backend: PlannerBackend
    ):
        self.sizes, self.topology, self.options, self.batch, self.backend = sizes, topology, options, batch, backend
        self.of_group = {id(group): size for _, group, size in group_sizes(sizes, topology, options.expert_shard_dim)}
        # Before each unit: bytes of weights that are not freed after the forward, and saved bytes per token.
        self.stays, self.kept = [0], [0.0]
        for unit in sizes.units:
            layer = sizes.traced.layers.get(unit.name)
            self.stays.append(self.stays[-1] + sum(self.gathered(g) for g in unit.groups if not g.freed))
            self.kept.append(self.kept[-1] + (self._kept(layer) if layer else 0.0))
        # From each unit on: bytes of the reused memory of experts' gradients in backward.
        self.waits = [0]
        for unit in reversed(sizes.units):
            self.waits.insert(0, max([self.waits[0], *map(self.recycled, unit.groups)]))

    def shard(self, group: ParamGroup) -> int:
        return self.of_group[id(group)].local * self.sizes.master.itemsize

    def trained_shard(self, group: ParamGroup) -> int:
        return self.of_group[id(group)].trained * self.sizes.master.itemsize

    def shards(self) -> list[int]:
        """Return the bytes of a rank's parameters, by unit."""
        return [sum(map(self.shard, unit.groups)) for unit in self.sizes.units]

    def trained_shards(self) -> list[int]:
        """Return the bytes of a rank's trained parameters, by unit."""
        return [sum(map(self.trained_shard, unit.groups)) for unit in self.sizes.units]

    def gathered(self, group: ParamGroup) -> int:
        return self.of_group[id(group)].full * group.compute.itemsize

    def recycled(self, group: ParamGroup) -> int:
        """Return the bytes of the reused memory that the gradients of a group take."""
        if not (group.is_experts and self.backend.on_cpu) or self.options.experts_backend == "reference":
            return 0
        ranks, shard_dim = self.of_group[id(group)].ranks, self.options.expert_shard_dim
        trained = group.shapes.keys() - group.frozen
        sizes = [ranks * group.local_of(name, self.topology, shard_dim) * group.compute.itemsize for name in trained]
        # With chunks there are two sets: a chunk's gradients are added to those of the chunks before.
        return sum(size for size in sizes if size >= MIN_BYTES) * min(self.options.dispatch_chunks, 2)

    def ahead(self, units: list[Unit], forward: bool) -> int:
        """Return the bytes of the buffers of prefetched units."""
        groups = [group for unit in units for group in unit.groups if forward or group.gathered_again]
        return sum(self.gathered(group) for group in groups if self.of_group[id(group)].ranks > 1)

    def of_unit(self, i: int) -> Iterator[tuple[str, bool, int, int]]:
        """Yield each point's name, whether it is in backward, and bytes of weights with buffers, and of activations."""
        units, depth = self.sizes.units, self.options.prefetch_depth
        unit = units[i]
        main = max(unit.groups, key=self.gathered)
        others = sum(self.gathered(group) for group in unit.groups if group is not main)
        stays = self.stays[i]
        size, compute, reduce = self.of_group[id(main)], main.compute.itemsize, self.options.reduce_dtype.itemsize
        weights = self.gathered(main)
        gathering = (weights if size.ranks > 1 else 0) + weights + size.moved * compute

        ahead = self.ahead(list(units[i + 1 : i + 1 + depth]), forward=True)
        held = stays + others + ahead + gathering
        yield "gathering in forward", False, held, self.activations(i, None, experts=not main.is_experts)
        yield "forward", False, held - size.moved * compute, self.activations(i, None, experts=True)

        before = [u for u in units[max(i - depth, 0) : i] if u.name != EMBEDDINGS]
        kept = stays + others + self.ahead(before, forward=False)
        waits = self.waits[i + 1]
        if not main.is_experts:
            kept, waits = kept + self.waits[i], 0
        own = max(self.recycled(main), waits)
        if main.gathered_again:
            computed = self.options.checkpointing == "full" and main.is_experts
            held = kept + waits + gathering
            yield "gathering in backward", True, held, self.activations(i, main, experts=not computed)
        read = 0 if main.freed and not main.gathered_again else weights
        gradients, packed = size.reduced * compute, size.reduced * reduce
        last = size.last * compute
        # With one rank the packed gradients are the result (fsdp/single_rank_reduce.py).
        summed = packed if size.ranks == 1 else packed + size.trained * reduce + (packed if self.backend.on_cpu else 0)
        cast = self.trained_shard(main) if self.sizes.master != self.options.reduce_dtype else 0
        # Each chunk of a layer's tokens makes gradients of all its experts, which are added to those before.
        added = gradients if main.is_experts and self.options.dispatch_chunks > 1 else 0
        for share, working in self.phases(i, main):
            there = max(int(share * gradients) + added, waits)
            yield "gradients", True, kept + read + there, self.activations(i, main, experts=False) + working
        left = self.activations(i, main, experts=not main.is_experts)
        written = gradients + max(last, own) if size.moved else max(gradients, own)
        yield "packing gradients", True, kept + written + packed, left
        yield "reducing gradients", True, kept + summed + cast + max(last, own), left

    def phases(self, i: int, group: ParamGroup) -> list[tuple[float, int]]:
        """Return the phases of a group's backward: the share of its gradients that exists, and bytes of the experts."""
        layer = self.sizes.traced.layers.get(self.sizes.units[i].name)
        if layer is None:
            return [(1.0, 0)]
        kept, rows = self._experts(layer), self.batch.tokens * self.batch.imbalance
        found = layer.local if self.topology.ep == 1 else layer.dispatched
        if not group.is_experts or not found:
            return [(1.0, int(kept * self.batch.tokens))]
        return [(share, int(nbytes * rows / self.options.dispatch_chunks)) for share, nbytes in found]

    def activations(self, i: int, group: ParamGroup | None, experts: bool) -> int:
        """Return the bytes of activations of the layers before a unit, and of the unit itself while it computes.

        Args:
            group: the group of the unit whose backward runs; None in forward.
            experts: whether the tensors that the unit's experts save exist.
        """
        name = self.sizes.units[i].name
        layer = self.sizes.traced.layers.get(name)
        per_token = self.kept[i]
        if layer is not None:
            per_token += self._working(layer, beside_experts=group is not None and group.is_experts)
            per_token += self._experts(layer) if experts else 0
        if layer or name == HEAD:
            per_token += self.sizes.traced.outside
        return int(per_token * self.batch.tokens)

    def all_activations(self) -> int:
        """Return the saved bytes of all layers."""
        return int((self.kept[-1] + self.sizes.traced.outside) * self.batch.tokens)

    def _kept(self, layer: LayerActivations) -> float:
        if self.options.checkpointing == "full":
            return 0 if self.options.activation_offload else layer.input
        if self.options.checkpointing == "selective":
            return layer.selective + self._experts(layer)
        return layer.dense + self._by_sequences(layer) + self._experts(layer)

    def _experts(self, layer: LayerActivations) -> float:
        return (layer.experts - (layer.sent if self.topology.ep == 1 else 0)) * self.batch.imbalance

    def _by_sequences(self, layer: LayerActivations) -> float:
        """Return what sequence parallelism saves in addition: the output of attention, and repeated keys and values."""
        if self.batch.sp == 1:
            return 0
        at = layer.attention
        repeated = (at.key + at.value) * (at.copies(self.batch.sp) - 1)
        return (at.output + repeated) * self.options.param_dtype.itemsize

    def _working(self, layer: LayerActivations, beside_experts: bool) -> float:
        """Return bytes per token of the layer that computes, without its experts'.

        With ``beside_experts`` the experts' backward runs, and no other part of the layer is recomputed.
        """
        if self.options.checkpointing == "selective":
            recomputed = 0 if beside_experts else layer.recomputed + self._by_sequences(layer)
            return layer.selective + recomputed
        kept = layer.input if self.options.checkpointing == "full" else 0
        return layer.dense + self._by_sequences(layer) + kept

    def logits(self) -> int:
        """Return the bytes of the logits and their gradient in the compute dtype, and of their softmax in float32."""
        if self.options.head_in_root:  # fused cross-entropy allocates none
            return 0
        width = 2 * self.options.param_dtype.itemsize + 4
        return self.batch.tokens * self.sizes.outputs * width


def _states(
    sizes: ModelSizes, topology: Topology, options: ShardingOptions, optimizer: OptimizerKind | None
) -> Iterator[int]:
    """Yield the bytes of each parameter's state: two moments for AdamW, one for the matrices that Muon steps."""
    if optimizer is None:
        return
    for unit in sizes.units:
        for group in unit.groups:
            for name in group.shapes.keys() - group.frozen:
                number = 1 if optimizer == "muon" and name in sizes.matrices else 2
                local = group.local_of(name, topology, options.expert_shard_dim)
                yield number * local * sizes.master.itemsize


def _by_kind(sizes: ModelSizes, shards_of: Callable[[ParamGroup], int]) -> tuple[int, int]:
    """Return the bytes of a rank's experts and of the rest; each has an optimizer of its own."""
    groups = [group for unit in sizes.units for group in unit.groups]
    return (
        sum(shards_of(group) for group in groups if group.is_experts),
        sum(shards_of(group) for group in groups if not group.is_experts),
    )
