"""What a training step moves and computes on each rank, and how long that takes at least."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.fsdp.options import ShardingOptions
from ...engine.fsdp.unit import EMBEDDINGS
from ...engine.planner.memory import Batch
from ...engine.planner.model_sizes import ModelSizes, unit_sizes
from ...engine.planner.traffic import Collective
from ...engine.topology.mesh import Topology

__all__ = ["ERROR", "Cluster", "Roofline", "roofline", "seconds"]

# The most that a published figure was off of what was fitted on others (benchmarks/results/published.md).
ERROR = 0.22


@dataclass(frozen=True)
class Cluster:
    """
    Args:
        gib: memory of a GPU.
        inside, between: GB/s of a rank to others of its node, and of its network interface.
        tflops: of matrix products in bfloat16, as published.
        efficiency, attention: share of these that linears and experts reach, and attention. Both stand for what is not
            counted beside them, too; ``benchmarks/update/published.py`` fits them on published figures.
        half_rate_rows: rows with which a matrix product reaches half of its rate: it reaches
            ``rows / (rows + half_rate_rows)`` of it. This package's kernels on an H100 (benchmarks/results/gpu.md)
            reach 59 % of a large product's rate with 1,024 rows of each expert, and 69 % with 2,048.
        hbm: GB/s of a GPU's memory.
    """

    nodes: int
    gpus: int
    gib: float = 80.0
    inside: float = 400.0
    between: float = 45.0
    tflops: float = 989.0
    efficiency: float = 0.58
    attention: float = 0.2
    half_rate_rows: float = 400.0
    hbm: float = 3350.0

    @property
    def world(self) -> int:
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step: FSDP's collectives run beside the computation, and for the all-to-alls it waits.

    Args:
        all_to_all: what no chunk of a layer's tokens computes beside.
    """

    compute: float
    fsdp: float
    all_to_all: float
    optimizer: float

    @property
    def step(self) -> float:
        return max(self.compute, self.fsdp) + self.all_to_all + self.optimizer


def seconds(collective: Collective, cluster: Cluster) -> float:
    """Return the time at the rate of the slower of the two kinds of links, without latency."""
    ranks, nbytes = collective.ranks, collective.nbytes
    if ranks == 1:
        return 0.0
    per_node = max(1, min(ranks, cluster.gpus // collective.stride))
    inside = nbytes * (per_node - 1) / ranks
    between = nbytes * (1 - per_node / ranks)
    if not collective.name.startswith("all-to-all"):
        inside = nbytes * (per_node - 1) / per_node  # what a node receives once is passed on in it
        between /= per_node
    return collective.passes * max(inside / cluster.inside, between / cluster.between) / 1e9


def roofline(
    sizes: ModelSizes,
    topology: Topology,
    options: ShardingOptions,
    batch: Batch,
    cluster: Cluster,
    moved: Sequence[Collective],
    length: int,
) -> Roofline:
    """Return the least time of a step.

    Args:
        moved: the collectives of the step.
        length: tokens of a sequence, for attention.
    """
    by_tokens = sum(seconds(c, cluster) for c in moved if c.name.startswith("all-to-all"))
    by_fsdp = sum(seconds(c, cluster) for c in moved if not c.name.startswith("all-to-all"))

    def is_recomputed(stage: str) -> bool:
        return sizes.traced.checkpointing(stage, options.checkpointing) == "full"

    compute = by_experts = 0.0
    rate = cluster.tflops * cluster.efficiency * 1e12
    counts = iter(sizes.num_experts)
    sharded = unit_sizes(sizes, topology, options.expert_shard_dim)
    for stage, unit, size in sharded:
        if stage == EMBEDDINGS:
            continue
        again = float(is_recomputed(stage))
        elements, rows = float(size.full), float(batch.tokens)
        if unit.is_experts:
            # Balanced: of a layer's experts a token uses K, wherever they are.
            layer = sizes.traced.layers[stage]
            share = topology.ep * topology.etp * layer.rows / next(counts)
            elements *= share * batch.imbalance
            rows *= share
            if layer.ends_with_experts:  # which are computed again up to their last linear
                shapes = {name: math.prod(shape) for name, shape in unit.shapes.items()}
                again *= 1 - sum(n for name, n in shapes.items() if name.endswith("down_proj")) / sum(shapes.values())
        took = (3 + again) * 2 * elements * batch.tokens / rate * (1 + cluster.half_rate_rows / rows)
        compute += took
        by_experts += took if unit.is_experts else 0
    for name, layer in sizes.traced.layers.items():
        # Causal: half of the products of queries and keys, and of their weights and values.
        products = batch.tokens * length * (layer.attention.query + layer.attention.output)
        compute += (3.5 + is_recomputed(name)) * products / (cluster.tflops * cluster.attention * 1e12)
    # All chunks but one are exchanged while another computes.
    rows = sum(seconds(c, cluster) for c in moved if c.name == "all-to-all tokens")
    by_tokens -= min(rows, by_experts * batch.micro_batches) * (1 - 1 / options.dispatch_chunks)
    shards = sum(size.local for _, _, size in sharded)
    optimizer = 7 * shards * sizes.master.itemsize / cluster.hbm / 1e9  # reads 4, writes 3
    return Roofline(compute * batch.micro_batches, by_fsdp, by_tokens, optimizer)
