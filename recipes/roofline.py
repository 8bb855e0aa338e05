"""What a training step moves and computes on each rank, and how long that takes at least."""

from dataclasses import dataclass

from ..engine.memory_plan import Batch, ModelSizes, group_sizes
from ..engine.mesh import Topology
from ..engine.parallelize import ShardingOptions
from ..engine.param_groups import EMBEDDINGS, ParamGroup
from ..engine.step_traffic import Collective, collectives

__all__ = ["Cluster", "Roofline", "roofline", "seconds"]


@dataclass(frozen=True)
class Cluster:
    """
    Args:
        gib: memory of a GPU.
        inside, between: GB/s of a rank to others of its node, and of its network interface.
        tflops: of matrix products in bfloat16, as published.
        efficiency: share of these that is reached.
        hbm: GB/s of a GPU's memory.
    """

    nodes: int
    gpus: int
    gib: float = 80.0
    inside: float = 400.0
    between: float = 45.0
    tflops: float = 989.0
    efficiency: float = 0.5
    hbm: float = 3350.0

    @property
    def world(self) -> int:
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step: tokens wait for the all-to-alls, and FSDP's collectives run beside the computation."""

    compute: float
    fsdp: float
    all_to_all: float
    optimizer: float

    @property
    def step(self) -> float:
        return max(self.compute, self.fsdp) + self.all_to_all + self.optimizer


def seconds(collective: Collective, cluster: Cluster) -> float:
    """At the rate of the slower of the two kinds of links, without latency."""
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
    length: int,
) -> Roofline:
    """
    Args:
        length: tokens of a sequence, for attention.
    """
    moved = collectives(sizes, topology, options, batch)
    by_tokens = sum(seconds(c, cluster) for c in moved if c.name.startswith("all-to-all"))
    by_fsdp = sum(seconds(c, cluster) for c in moved if not c.name.startswith("all-to-all"))
    forwards = 2 if options.checkpointing == "full" else 1
    compute = 0.0
    widths = iter(sizes.num_experts)
    groups = group_sizes(sizes, topology, options.expert_shard_dim)
    for unit, group, size in groups:
        if unit == EMBEDDINGS:
            continue
        elements: float = size.full
        if group.is_experts:
            # Balanced: of a layer's experts a token uses K, wherever they are.
            experts, width = next(widths), _rows_per_token(sizes, group)
            elements = size.full * topology.ep * width / experts * batch.imbalance
        products = 2 * elements * batch.tokens / (cluster.tflops * cluster.efficiency) / 1e12
        reading = size.full * group.compute.itemsize / cluster.hbm / 1e9
        compute += (forwards + 2) * max(products, reading)
    for layer in sizes.traced.layers.values():
        # Causal: half of the products of queries and keys, and of their weights and values.
        products = batch.tokens * length * (layer.attention.query + layer.attention.output)
        compute += (forwards + 2.5) * products / (cluster.tflops * cluster.efficiency) / 1e12
    shards = sum(size.local for _, _, size in groups)
    optimizer = 7 * shards * sizes.master.itemsize / cluster.hbm / 1e9  # reads 4, writes 3
    return Roofline(compute * batch.micro_batches, by_fsdp, by_tokens, optimizer)


def _rows_per_token(sizes: ModelSizes, group: ParamGroup) -> float:
    layer = next(
        layer for name, layer in sizes.traced.layers.items() if next(iter(group.shapes)).startswith(f"{name}.")
    )
    return layer.rows
