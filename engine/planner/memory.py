"""Predict the memory of a training step on each rank, from sizes alone; ``benchmarks/update/memory.py`` measures it.

The shards and the optimizer's states are always in memory. Added to these is the maximum over the points of a step. In
each stage (embeddings, a layer, the head) one unit of parameters is the largest. X is the part of it that a rank
computes with: of experts its own over ``ep``, gathered over ``ep_fsdp``. "Ahead" are the stages that are prefetched.

- forward, and gathering in backward: a buffer of X for this stage and each ahead. The weights are copied out of it, X.
  If they are sharded along another dim than the first, these are copied again, X;
- computing gradients: the buffers ahead, the weights, X, and their gradients, X; X more for experts whose tokens are
  dispatched in chunks; and what the backward holds (``LayerActivations.backward``);
- packing gradients for the reduction: the buffers ahead; X of gradients (a copy, and the last parameter's own, if they
  are sharded along another dim than the first), and X packed;
- reducing: the buffers ahead; X packed; with several ranks, X that gloo copies, and the rank's shard of the sum; the
  last parameter's gradient.

In backward there are also the gradients of the finished stages, and the saved tensors of the others. A unit on a single
rank has FSDP's copies on a GPU. On a CPU it has no buffer: shards in its compute dtype are its weights. Its
gradients are packed only with replicas or offloading (``fsdp/single_rank.py``). With ``keep_casts`` the cast weights of
all such units stay at every point of forward and backward. Weights that are not freed after the forward stay until the
backward, and are not gathered again. With several micro-batches all gradients exist from the second on. A tensor that
exists for a part of a point is counted for all of it, so the prediction errs on the high side.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ..fsdp.activation_checkpoint import Checkpointing
from ..fsdp.options import ShardingOptions
from ..fsdp.unit import EMBEDDINGS, HEAD, Stage, Unit
from ..head.log_probs import tile_bytes
from ..topology.expert_placement import check_experts_divide, check_inner_divides
from ..topology.mesh import Topology
from .activations import LayerActivations
from .model_sizes import ModelSizes, unit_sizes

__all__ = ["IMBALANCE", "Batch", "MemoryPoint", "OptimizerKind", "peak", "saved_bytes", "timeline"]

_ORDER = 4  # bytes of a row's place in another order
IMBALANCE = 1.2  # assumed if nothing is known of the routing
OptimizerKind = Literal["adamw", "muon"]


@dataclass(frozen=True)
class Batch:
    """The work of a rank in a step: ``micro_batches`` of ``tokens`` each, whose gradients are summed.

    Args:
        imbalance: rows of the busiest rank's experts over the mean.
        sp: sequence-parallel size: ranks that share a micro-batch of ``sp`` times as many tokens.
    """

    tokens: int
    micro_batches: int = 1
    imbalance: float = 1.0
    sp: int = 1


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes by part at one point of a step, on the rank with the most.

    ``buffers`` are gathered parameters, gradients before they are reduced, and temporaries of collectives.
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
    gloo: bool = False,
) -> Iterator[MemoryPoint]:
    """Yield the memory of a step at each point that may be its peak.

    Args:
        optimizer: None for an optimizer with unknown states; they are not counted.
        gloo: whether gloo reduces, which copies its input.

    Raises:
        SettingError: the mesh would split an expert, or an explicit shard dim does not divide.
    """
    check_experts_divide(sizes.num_experts, topology, sizes.name)
    check_inner_divides(sizes.etp_sizes, topology, sizes.name)
    step = _Step(sizes, topology, options, batch, gloo)
    on_rank = 0 if options.cpu_offload else sizes.master.itemsize  # bytes of an element of a shard
    parameters = (sizes.whole if on_rank else 0) + on_rank * sum(size.local for size in step.size.values())
    all_gradients = on_rank * step.trained(sizes.stages)
    states = 0 if optimizer is None else 2 * all_gradients
    if optimizer == "muon":  # one state for the matrices that it steps, and AdamW's two for the rest
        states -= on_rank * step.stepped_by_muon()
    before = all_gradients if batch.micro_batches > 1 else 0  # of the micro-batches that are done
    for i, stage in enumerate(sizes.stages):
        done = before or on_rank * step.trained(sizes.stages[i + 1 :])
        for when, in_backward, buffers, kept in step.of_stage(i):
            logits = step.logits() if stage.name == HEAD and in_backward else 0
            gradients = done if in_backward else before
            yield MemoryPoint(f"{stage.name}, {when}", parameters, gradients, states, buffers, kept, logits)
    if sizes.stages[-1].name != HEAD:  # the root has it
        yield MemoryPoint("logits", parameters, before, states, step.stays[-1], step.activations(), step.logits())
    yield MemoryPoint("optimizer", parameters, all_gradients, states)


def saved_bytes(
    sizes: ModelSizes,
    topology: Topology,
    options: ShardingOptions,
    contents: Collection[str],
    optimizer: OptimizerKind | None = "adamw",
) -> int:
    """Return the bytes of a rank's part of a checkpoint with these ``save_contents``."""
    *_, at_rest = timeline(sizes, topology, replace(options, cpu_offload=False), Batch(0), optimizer)
    has_model = not {"model", "hf_model"}.isdisjoint(contents)
    return at_rest.parameters * has_model + at_rest.optimizer * ("optimizer" in contents)


class _Step:
    def __init__(self, sizes: ModelSizes, topology: Topology, options: ShardingOptions, batch: Batch, gloo: bool):
        self.sizes, self.topology, self.options, self.batch, self.gloo = sizes, topology, options, batch, gloo
        self.size = {id(unit): size for _, unit, size in unit_sizes(sizes, topology, options.expert_shard_dim)}
        # Before each stage: bytes of weights that are not freed after the forward (kept casts included), and saved
        # bytes per token.
        units = [unit for stage in sizes.stages for unit in stage.units]
        self.stays, self.kept = [sum(self.whole(unit) for unit in units if self.is_cast_kept(unit))], [0.0]
        for stage in sizes.stages:
            layer = sizes.traced.layers.get(stage.name)
            self.stays.append(self.stays[-1] + sum(self.gathered(u) for u in stage.units if not u.is_freed))
            self.kept.append(self.kept[-1] + (self._kept(layer, self._checkpointing(stage.name)) if layer else 0.0))

    def _checkpointing(self, layer: str) -> Checkpointing:
        return self.sizes.traced.checkpointing(layer, self.options.checkpointing)

    def trained(self, stages: Sequence[Stage]) -> int:
        return sum(self.size[id(unit)].trained for stage in stages for unit in stage.units)

    def stepped_by_muon(self) -> int:
        units = [unit for stage in self.sizes.stages for unit in stage.units]
        trained = [(unit, name) for unit in units for name in unit.shapes.keys() - unit.frozen]
        dim = self.options.expert_shard_dim
        return sum(u.local_numel(n, self.topology, dim) for u, n in trained if n in self.sizes.matrices)

    def whole(self, unit: Unit) -> int:
        return self.size[id(unit)].full * unit.param_dtype.itemsize

    def is_cast_kept(self, unit: Unit) -> bool:
        """Return whether the unit's cast weights stay from the first micro-batch to the last."""
        is_alone = self.size[id(unit)].ranks == 1 and not self.options.cpu_offload
        return self.options.keep_casts and is_alone and unit.param_dtype != self.sizes.master

    def gathered(self, unit: Unit) -> int:
        uses_shards = self.size[id(unit)].ranks == 1 and (self.gloo or self.options.keep_casts)
        is_shard = uses_shards and unit.param_dtype == self.sizes.master
        is_there = (is_shard and not self.options.cpu_offload) or self.is_cast_kept(unit)
        return 0 if is_there else self.whole(unit)

    def ahead(self, stages: Sequence[Stage], forward: bool) -> int:
        """Return the bytes of the buffers of prefetched stages."""
        units = [unit for stage in stages for unit in stage.units if forward or unit.is_gathered_again]
        return sum(self.gathered(unit) for unit in units if self.size[id(unit)].ranks > 1)

    def of_stage(self, i: int) -> Iterator[tuple[str, bool, int, int]]:
        """Yield each point's name, whether it is in backward, and bytes of weights with buffers, and of activations."""
        stages, depth = self.sizes.stages, self.options.prefetch_depth
        main = max(stages[i].units, key=self.whole)
        size, compute, reduce = self.size[id(main)], main.param_dtype.itemsize, self.options.reduce_dtype.itemsize
        weights = self.gathered(main)
        buffer = 0 if size.ranks == 1 and (self.gloo or self.options.keep_casts) else weights
        gathering = buffer + weights + size.moved * compute
        held = self.stays[i] + sum(self.gathered(unit) for unit in stages[i].units if unit is not main)
        alone, with_experts, in_backward = (self.activations(i, what) for what in ("dense", "saved", "backward"))
        yield "forward", False, held + self.ahead(stages[i + 1 : i + 1 + depth], True) + gathering, with_experts

        held += self.ahead([s for s in stages[max(i - depth, 0) : i] if s.name != EMBEDDINGS], False)
        if main.is_gathered_again:
            is_recomputed = main.is_experts and self._checkpointing(stages[i].name) == "full"
            yield "gathering in backward", True, held + gathering, alone if is_recomputed else with_experts
        read = 0 if main.is_freed and not main.is_gathered_again else weights
        gradients, packed, last = size.reduced * compute, size.reduced * reduce, size.last * compute
        is_kept = main.keeps_gradients(self.topology, self.options.cpu_offload, "cpu" if self.gloo else "cuda")
        if is_kept and main.param_dtype == self.options.reduce_dtype:
            packed = 0
        # Each chunk of a layer's tokens makes gradients of all its experts, which are added to those before.
        sets = 2 if main.is_experts and self.options.dispatch_chunks > 1 else 1
        yield "gradients", True, held + read + sets * gradients, in_backward
        left = alone if main.is_experts else with_experts
        written = gradients + last if size.moved else gradients
        yield "packing gradients", True, held + written + packed, left
        if is_kept:
            summed = packed or gradients
        elif size.ranks == 1:  # what is packed is the result
            # On a GPU a buffer that is added to earlier gradients is reused only when another stream has passed it.
            summed = packed * (1 + (self.batch.micro_batches > 1 and not self.gloo))
        else:
            summed = (1 + self.gloo) * packed + size.trained * reduce
        cast = size.trained * self.sizes.master.itemsize if self.sizes.master != self.options.reduce_dtype else 0
        yield "reducing gradients", True, held + summed + cast + last, left

    def activations(self, i: int | None = None, what: str = "saved") -> int:
        """Return the bytes of activations of the layers before stage ``i``, and of the stage while it computes.

        Args:
            i: None for all saved activations of the model.
            what: the part of the stage: saved outside its experts ("dense"), all saved, or with its backward's tensors.
        """
        if i is None:
            return int((self.kept[-1] + self.sizes.traced.outside) * self.batch.tokens)
        name, per_token = self.sizes.stages[i].name, self.kept[i]
        layer = self.sizes.traced.layers.get(name)
        if layer is not None:
            experts = 0 if what == "dense" else self._experts(layer)
            per_token += self._working(layer, self._checkpointing(name)) + experts
            if what == "backward":
                # etp multiplies the rows and their gradients; the experts' inner dims are cut by as much.
                rows = self.batch.imbalance * self.topology.etp / self.options.dispatch_chunks if layer.rows else 1
                per_token += self._backward(layer) * rows
        if layer or name == HEAD:
            per_token += self.sizes.traced.outside
        return int(per_token * self.batch.tokens)

    def _kept(self, layer: LayerActivations, checkpointing: Checkpointing) -> float:
        if checkpointing == "full":
            return self._plan(layer) + (0 if self.options.activation_offload else layer.input)
        if checkpointing == "selective":
            return layer.selective + self._experts(layer)
        return layer.dense + self._by_sequences(layer) + self._experts(layer)

    def _plan(self, layer: LayerActivations) -> float:
        etp = self.topology.etp
        return _ORDER * layer.rows * (1 + (self.batch.imbalance * etp if self.topology.ep * etp > 1 else 0))

    def _working(self, layer: LayerActivations, checkpointing: Checkpointing) -> float:
        """Return bytes per token of the computing layer, without its experts."""
        if checkpointing == "selective":
            return layer.selective + layer.recomputed + self._by_sequences(layer)
        kept = layer.input if checkpointing == "full" else 0
        if self.options.activation_offload and not self.gloo:
            kept *= 2  # the one before it arrives from the host
        return layer.dense + self._by_sequences(layer) + kept

    def _experts(self, layer: LayerActivations) -> float:
        # Received rows include those of the other ranks of etp; an expert's inner dim is cut.
        received = self.topology.etp if self.topology.ep * self.topology.etp > 1 else 0
        return (layer.experts + (received - 1) * layer.sent) * self.batch.imbalance

    def _backward(self, layer: LayerActivations) -> float:
        backend = self.options.experts_backend
        if not layer.rows or backend not in ("auto", "triton") or (backend == "auto" and self.gloo):
            return layer.backward
        received = layer.row_width * self.options.param_dtype.itemsize if self.topology.ep > 1 else 0
        return min(layer.backward_by_index + received, layer.backward)

    def _by_sequences(self, layer: LayerActivations) -> float:
        """Return bytes per token that sequence parallelism adds: the output of attention, repeated keys and values."""
        if self.batch.sp == 1:
            return 0
        at = layer.attention
        repeated = (at.key + at.value) * (at.copies(self.batch.sp) - 1)
        return (at.output + repeated) * self.options.param_dtype.itemsize

    def logits(self) -> int:
        """Return the bytes of the logits, their gradient and their float32 softmax, for all tokens or for a tile."""
        if self.options.head_in_root:  # fused cross-entropy allocates none
            return 0
        tokens, outputs, dtype = self.batch.tokens, self.sizes.outputs, self.options.param_dtype
        if self.sizes.chunked_logits:
            return tile_bytes(tokens, outputs, self.sizes.head_width, dtype, "cpu" if self.gloo else "cuda")
        return tokens * outputs * (2 * dtype.itemsize + 4)
