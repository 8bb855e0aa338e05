"""How much memory a training step needs on each rank, from sizes alone; ``benchmarks/memory.py`` measures it.

Resident are the shards and the optimizer's states. To that comes the largest of what a step needs at its moments. In
each unit (embeddings, a layer, the head) one group of parameters is the largest. X is the part of it that a rank
computes with: of experts its own over ``ep``, their ``ep_fsdp`` shards put together. "Ahead" are the units whose
gathers are under way.

- gathering, in forward and backward: a buffer of X for this unit and each ahead; the weights copied out of it, X; and a
  copy of these, X, if they are cut along another dim than the first;
- computing gradients: the buffers ahead, the weights, X, and their gradients, X;
- packing gradients to be reduced: the buffers ahead; X of gradients (copied, and the last parameter's own, if they are
  cut along another dim than the first), and X packed;
- reducing: the buffers ahead; X packed; X that gloo copies; the rank's shard of the sum; the last parameter's gradient.

In backward the gradients of the units that are done are there too, and what is kept for those to come. Where no other
rank shares a group nothing is gathered. What is not freed after the forward stays until the backward, and is not
gathered again. With several micro-batches all gradients are there from the second on.
"""

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from .activations import LayerActivations, Traced, trace
from .matrices import muon_parameters
from .mesh import Topology
from .modeling import build_on_meta
from .parallelize import ShardingOptions
from .param_groups import EMBEDDINGS, HEAD, GroupSizes, ParamGroup, Unit, units_of
from .placement import check_experts_divide

__all__ = ["Backend", "Batch", "ModelSizes", "Moment", "group_sizes", "moments", "peak"]

Optimizer = Literal["adamw", "muon"]


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """What the arithmetic needs to know of a model.

    Args:
        master: dtype of the parameters that the optimizer steps on.
        whole: bytes that every rank holds whole.
        num_experts: of each experts module.
        matrices: parameters that Muon steps.
    """

    name: str
    units: tuple[Unit, ...]
    traced: Traced
    master: torch.dtype
    whole: int
    vocabulary: int
    num_experts: tuple[int, ...]
    matrices: Collection[str]

    @classmethod
    def of(
        cls,
        auto_class: Any,
        config: PretrainedConfig,
        options: ShardingOptions,
        master: torch.dtype = torch.float32,
    ) -> "ModelSizes":
        """Build the model on the meta device, and look.

        Raises:
            UnsupportedModelError: it has no experts that can be dispatched, or can't be traced.
        """
        model: Any = build_on_meta(auto_class, config, master)
        model.tie_weights()  # which going to meta may have undone
        units, whole = units_of(model, options)
        counts = tuple(
            next(iter(group.shapes[name][dim] for name, dim in group.ep_dims.items()))
            for unit in units
            for group in unit.groups
            if group.is_experts
        )
        matrices = frozenset(muon_parameters(model))
        if options.param_dtype != master:
            model = build_on_meta(auto_class, config, options.param_dtype)
        traced = trace(model, options.expert_plan)
        vocabulary = model.config.get_text_config().vocab_size
        return cls(type(model).__name__, tuple(units), traced, master, whole, vocabulary, counts, matrices)

    def check(self, topology: Topology) -> None:
        """
        Raises:
            SettingError: the mesh would split an expert.
        """
        check_experts_divide(self.num_experts, topology, self.name)


@functools.lru_cache(maxsize=1024)
def group_sizes(
    sizes: ModelSizes, topology: Topology, shard_dim: int | str = "auto"
) -> tuple[tuple[str, ParamGroup, GroupSizes], ...]:
    """Each group with its unit's name and its sizes, in the order of the forward.

    Raises:
        SettingError: as ``ParamGroup.sizes``.
    """
    pairs = [(unit.name, group) for unit in sizes.units for group in unit.groups]
    return tuple((unit, group, group.sizes(topology, shard_dim)) for unit, group in pairs)


@dataclass(frozen=True)
class Batch:
    """What a rank computes in a step.

    Args:
        tokens: of a micro-batch, on one rank.
        micro_batches: whose gradients are added up.
        imbalance: rows that the busiest rank's experts get, over the mean.
    """

    tokens: int
    micro_batches: int = 1
    imbalance: float = 1.0


@dataclass(frozen=True)
class Backend:
    """``copies``: gloo copies what it sends. ``foreach``: the optimizer steps many parameters at a time."""

    copies: bool = False
    foreach: bool = True


@dataclass(frozen=True)
class Moment:
    """Bytes on the rank that holds most, by part, at one moment of a step.

    ``buffers`` are gathered parameters, gradients before they are reduced, and what collectives and the optimizer take.
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


def peak(*args: Any, **kwargs: Any) -> Moment:
    """The moment of a step that needs most; arguments as ``moments``'s."""
    return max(moments(*args, **kwargs), key=lambda moment: moment.total)


def moments(
    sizes: ModelSizes,
    topology: Topology,
    options: ShardingOptions,
    batch: Batch,
    optimizer: Optimizer = "adamw",
    backend: Backend = Backend(),
) -> Iterator[Moment]:
    """What a step needs at each moment that may be its peak.

    Raises:
        SettingError: the mesh would split an expert, or an explicit shard dim does not divide.
    """
    sizes.check(topology)
    step = _Step(sizes, topology, options, batch, backend)
    on_host = options.cpu_offload
    shards = step.shards()
    parameters = 0 if on_host else sizes.whole + sum(shards)
    states = 0 if on_host else sum(_states(sizes, topology, options, optimizer))
    for i, unit in enumerate(sizes.units):
        done = sum(shards) if batch.micro_batches > 1 else sum(shards[i + 1 :])
        for when, gradients, buffers in step.of_unit(i):
            logits = step.logits() if unit.name == HEAD and gradients else 0
            held = done if gradients and not on_host else sum(shards) if batch.micro_batches > 1 and not on_host else 0
            yield Moment(f"{unit.name}, {when}", parameters, held, states, buffers, step.activations(i), logits)
    if not on_host:
        temporary = max(_by_kind(sizes, step.shard)) if backend.foreach else 0
        yield Moment("optimizer", parameters, sum(shards), states, temporary)


class _Step:
    def __init__(self, sizes: ModelSizes, topology: Topology, options: ShardingOptions, batch: Batch, backend: Backend):
        self.sizes, self.topology, self.options, self.batch, self.backend = sizes, topology, options, batch, backend
        self.of_group = {id(group): size for _, group, size in group_sizes(sizes, topology, options.expert_shard_dim)}
        # Before each unit: bytes of what is not freed after the forward, and what is kept per token.
        self.stays, self.kept = [0], [0.0]
        for unit in sizes.units:
            layer = sizes.traced.layers.get(unit.name)
            self.stays.append(self.stays[-1] + sum(self.gathered(g) for g in unit.groups if not g.freed))
            self.kept.append(self.kept[-1] + (self._kept(layer) if layer else 0.0))

    def shard(self, group: ParamGroup) -> int:
        return self.of_group[id(group)].local * self.sizes.master.itemsize

    def shards(self) -> list[int]:
        """Bytes of a rank's parameters, by unit."""
        return [sum(map(self.shard, unit.groups)) for unit in self.sizes.units]

    def gathered(self, group: ParamGroup) -> int:
        return self.of_group[id(group)].full * group.compute.itemsize

    def ahead(self, units: list[Unit], forward: bool) -> int:
        """Bytes of the buffers of units gathered ahead."""
        groups = [group for unit in units for group in unit.groups if forward or group.gathered_again]
        return sum(self.gathered(group) for group in groups if self.of_group[id(group)].ranks > 1)

    def of_unit(self, i: int) -> Iterator[tuple[str, bool, int]]:
        """When, whether it is in backward, and the bytes of weights and buffers."""
        units, depth = self.sizes.units, self.options.prefetch_depth
        unit = units[i]
        main = max(unit.groups, key=self.gathered)
        others = sum(self.gathered(group) for group in unit.groups if group is not main)
        stays = self.stays[i]
        size, compute, reduce = self.of_group[id(main)], main.compute.itemsize, self.options.reduce_dtype.itemsize
        weights = self.gathered(main)
        gathering = (weights if size.ranks > 1 else 0) + weights + size.moved * compute

        ahead = self.ahead(list(units[i + 1 : i + 1 + depth]), forward=True)
        yield "forward", False, stays + others + ahead + gathering

        before = [u for u in units[max(i - depth, 0) : i] if u.name != EMBEDDINGS]
        kept = stays + others + self.ahead(before, forward=False)
        if main.gathered_again:
            yield "gathering in backward", True, kept + gathering
        read = 0 if main.freed and not main.gathered_again else weights
        packed = size.full * reduce
        last = size.last * compute
        copied = packed if self.backend.copies or size.ranks == 1 else 0
        cast = self.shard(main) if self.sizes.master != self.options.reduce_dtype else 0
        yield "gradients", True, kept + read + weights
        yield "packing gradients", True, kept + weights + (last if size.moved else 0) + packed
        yield "reducing gradients", True, kept + packed + copied + size.local * reduce + cast + last

    def activations(self, i: int) -> int:
        """Kept of the layers up to a unit, and all of the unit's own."""
        name = self.sizes.units[i].name
        layer = self.sizes.traced.layers.get(name)
        per_token = self.kept[i] + (self._working(layer) if layer else 0)
        if layer or name == HEAD:
            per_token += self.sizes.traced.outside
        return int(per_token * self.batch.tokens)

    def _kept(self, layer: LayerActivations) -> float:
        if self.options.checkpointing == "full":
            return 0 if self.options.activation_offload else layer.input
        if self.options.checkpointing == "selective":
            return layer.selective + layer.experts * self.batch.imbalance
        return layer.dense + layer.experts * self.batch.imbalance

    def _working(self, layer: LayerActivations) -> float:
        experts = layer.experts * self.batch.imbalance
        if self.options.checkpointing == "selective":
            return layer.selective + layer.recomputed + experts
        return layer.dense + experts + (layer.input if self.options.checkpointing == "full" else 0)

    def logits(self) -> int:
        """The logits and their gradient in the dtype of the forward, and their softmax in float32."""
        width = 2 * self.options.param_dtype.itemsize + 4
        return self.batch.tokens * self.sizes.vocabulary * width


def _states(sizes: ModelSizes, topology: Topology, options: ShardingOptions, optimizer: Optimizer) -> Iterator[int]:
    """AdamW has two moments; Muon one for what it steps, and AdamW's two for the rest."""
    for unit in sizes.units:
        for group in unit.groups:
            for name in group.shapes:
                number = 1 if optimizer == "muon" and name in sizes.matrices else 2
                local = group.local_of(name, topology, options.expert_shard_dim)
                yield number * local * sizes.master.itemsize


def _by_kind(sizes: ModelSizes, shards_of: Callable[[ParamGroup], int]) -> tuple[int, int]:
    """Bytes of a rank's experts, and of the rest: each has an optimizer of its own."""
    groups = [group for unit in sizes.units for group in unit.groups]
    return (
        sum(shards_of(group) for group in groups if group.is_experts),
        sum(shards_of(group) for group in groups if not group.is_experts),
    )
