"""Predict the bytes of every collective of a training step, from sizes alone."""

import math
from dataclasses import dataclass

from ..fsdp.options import ShardingOptions
from ..fsdp.unit import ROOT
from ..moe.collectives.weights import is_gathered
from ..moe.gemm.backends import has_backend
from ..topology.mesh import Topology
from .memory import Batch
from .model_sizes import ModelSizes, unit_sizes

__all__ = ["Collective", "collectives"]

_COUNT = 8  # bytes of an expert's number of rows
_WEIGHT = 4  # bytes of a row's routing weight, and of its gradient


@dataclass(frozen=True)
class Collective:
    """All calls of one collective in a step, in a group of ``ranks`` that are ``stride`` apart.

    ``nbytes`` are those of the whole tensor, summed over calls. This is the output of an all-gather, the input of a
    reduce-scatter or an all-reduce, or a rank's input of an all-to-all.
    """

    name: str
    ranks: int
    stride: int
    calls: int
    nbytes: int

    @property
    def passes(self) -> int:
        return 2 if self.name.startswith("all-reduce") else 1

    @property
    def wire(self) -> float:
        """Bytes that a rank receives from others."""
        return self.passes * self.nbytes * (self.ranks - 1) / self.ranks


def collectives(sizes: ModelSizes, topology: Topology, options: ShardingOptions, batch: Batch) -> list[Collective]:
    """Return the collectives of one step on one rank."""
    found: dict[str, Collective] = {}

    def add(name: str, ranks: int, stride: int, calls: int, nbytes: int) -> None:
        if ranks > 1 and nbytes:
            old = found.get(name, Collective(name, ranks, stride, 0, 0))
            calls, nbytes = old.calls + calls * batch.micro_batches, old.nbytes + nbytes * batch.micro_batches
            found[name] = Collective(name, ranks, stride, calls, nbytes)

    modes = {name: sizes.traced.checkpointing(name, options.checkpointing) for name in sizes.traced.layers}
    for stage, unit, size in unit_sizes(sizes, topology, options.expert_shard_dim):
        kind = "experts" if unit.is_experts else "dense"
        stride = topology.ep * topology.etp if unit.is_experts else 1
        gathers = 1 + (unit.is_gathered_again and stage != ROOT)
        reduce = options.reduce_dtype.itemsize
        add(f"all-gather {kind}", size.ranks, stride, gathers, gathers * size.full * unit.param_dtype.itemsize)
        add(f"reduce-scatter {kind}", size.ranks, stride, 1, size.reduced * reduce)
        add(f"all-reduce {kind}", topology.dp_replicate, topology.fsdp, 1, size.trained * reduce)
        # Every rank of etp computes with whole halves of adapters; their gradients are summed.
        halves = [math.prod(unit.shapes[name]) for name in unit.ep_dims if is_gathered(name)]
        whole = sum(halves) // topology.ep * unit.param_dtype.itemsize
        forwards = 1 + (modes.get(stage) == "full")
        add("all-gather etp adapters", topology.etp, 1, forwards * len(halves), forwards * whole)
        add("reduce-scatter etp adapters", topology.etp, 1, len(halves), whole)
    chunks = options.dispatch_chunks
    counts = iter(sizes.num_experts)
    element = options.param_dtype.itemsize
    at_once = chunks == 1 and not options.overlap_shared_experts
    plain = at_once and not has_backend(options.experts_backend)
    for name, layer in sizes.traced.layers.items():
        forwards = 1 + (modes[name] == "full")
        if layer.row_width:
            rows = batch.tokens * layer.row_width * element
            # A recomputation of a layer may end before combine (moe/fused.py).
            ways = 2 * forwards + 2 - (forwards == 2 and at_once and layer.ends_with_experts)
            ep, etp, of_counts = topology.ep, topology.etp, chunks * next(counts) * _COUNT
            add("all-to-all tokens", ep, etp, chunks * ways, ways * rows)
            # etp adds a gather or a reduce-scatter to each way, with as many rows from each of its ranks.
            add("all-to-all etp tokens", etp, 1, chunks * ways, ways * rows * etp)
            if not plain:
                weights = batch.tokens * layer.rows * _WEIGHT
                add("all-to-all weights", ep, etp, chunks * (forwards + 1), (forwards + 1) * weights)
                add("all-to-all etp weights", etp, 1, chunks * (forwards + 1), (forwards + 1) * weights * etp)
            add("all-to-all counts", ep, etp, 1, of_counts)  # kept for a recomputation
            add("all-gather etp counts", etp, 1, 1, of_counts * etp)
        at = layer.attention
        width = at.query + at.output + (at.key + at.value) * at.copies(batch.sp)
        passes = 2 if modes[name] == "none" else 3
        add("all-to-all sp", batch.sp, 1, 2 * passes, passes * batch.tokens * width * element)
    return list(found.values())
