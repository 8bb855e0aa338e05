"""What a training step moves and computes on each rank, and how long that takes at least."""

from dataclasses import dataclass

from ..engine.memory_plan import Batch, ModelSizes, group_sizes
from ..engine.mesh import Topology
from ..engine.parallelize import ShardingOptions
from ..engine.param_groups import EMBEDDINGS, ROOT, ParamGroup

__all__ = ["Cluster", "Collective", "Roofline", "collectives", "roofline"]

_COUNT = 8  # bytes of a number of rows, one of each expert


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
class Collective:
    """All calls of a kind in a step.

    Args:
        stride: between the ranks of its group.
        nbytes: of the whole tensor in all calls: what an all-gather ends with, a reduce-scatter or an all-reduce starts
            with, and a rank hands to an all-to-all.
    """

    name: str
    ranks: int
    stride: int
    calls: int
    nbytes: int

    @property
    def wire(self) -> float:
        """Bytes that a rank receives from others."""
        passes = 2 if self.name.startswith("all-reduce") else 1
        return passes * self.nbytes * (self.ranks - 1) / self.ranks

    def seconds(self, cluster: Cluster) -> float:
        """At the rate of the slower of the two kinds of links, without latency."""
        if self.ranks == 1:
            return 0.0
        per_node = max(1, min(self.ranks, cluster.gpus // self.stride))
        inside = self.nbytes * (per_node - 1) / self.ranks
        between = self.nbytes * (1 - per_node / self.ranks)
        if not self.name.startswith("all-to-all"):
            inside = self.nbytes * (per_node - 1) / per_node  # what a node receives once is passed on in it
            between /= per_node
        passes = 2 if self.name.startswith("all-reduce") else 1
        return passes * max(inside / cluster.inside, between / cluster.between) / 1e9


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


def collectives(
    sizes: ModelSizes, topology: Topology, options: ShardingOptions, batch: Batch, sp: int = 1
) -> list[Collective]:
    """The collectives of one step on one rank; ``batch`` is what one rank has after ``sp`` has cut it."""
    found: dict[str, Collective] = {}

    def add(name: str, ranks: int, stride: int, calls: int, nbytes: int) -> None:
        if ranks > 1 and calls:
            old = found.get(name, Collective(name, ranks, stride, 0, 0))
            calls, nbytes = old.calls + calls * batch.micro_batches, old.nbytes + nbytes * batch.micro_batches
            found[name] = Collective(name, ranks, stride, calls, nbytes)

    for unit, group, size in group_sizes(sizes, topology, options.expert_shard_dim):
        kind = "experts" if group.is_experts else "dense"
        stride = topology.ep if group.is_experts else 1
        gathers = 1 + (group.gathered_again and unit != ROOT)
        reduce = options.reduce_dtype.itemsize
        add(f"all-gather {kind}", size.ranks, stride, gathers, gathers * size.full * group.compute.itemsize)
        add(f"reduce-scatter {kind}", size.ranks, stride, 1, size.full * reduce)
        add(f"all-reduce {kind}", topology.dp_replicate, topology.fsdp, 1, size.local * reduce)
    forwards = 2 if options.checkpointing == "full" else 1
    counts = iter(sizes.num_experts)
    element = options.param_dtype.itemsize
    for layer in sizes.traced.layers.values():
        if layer.row_width:
            rows = batch.tokens * layer.row_width * element
            chunks = options.dispatch_chunks
            add("all-to-all tokens", topology.ep, 1, chunks * (2 * forwards + 2), (2 * forwards + 2) * rows)
            add("all-to-all counts", topology.ep, 1, forwards, forwards * chunks * next(counts) * _COUNT)
        at = layer.attention
        keys = max(1.0, sp / at.key_heads)  # key-value heads are repeated to one per rank
        width = at.query + at.output + int((at.key + at.value) * keys)
        passes = forwards + 1 if options.checkpointing != "selective" else 3
        add("all-to-all sp", sp, 1, 4 * passes, passes * batch.tokens * width * element)
    return list(found.values())


def roofline(
    sizes: ModelSizes,
    topology: Topology,
    options: ShardingOptions,
    batch: Batch,
    cluster: Cluster,
    length: int,
    sp: int = 1,
) -> Roofline:
    """
    Args:
        length: tokens of a sequence, for attention.
    """
    moved = collectives(sizes, topology, options, batch, sp)
    by_tokens = sum(c.seconds(cluster) for c in moved if c.name.startswith("all-to-all"))
    by_fsdp = sum(c.seconds(cluster) for c in moved if not c.name.startswith("all-to-all"))
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
