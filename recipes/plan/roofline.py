"""Predict the time of a training step, part by part, from a rank's FLOPs and bytes.

A part's time is its size over a rate. Matrix products reach a share of the published matrix rate, and passes over
memory a share of the published bandwidth. The shares were measured on an H100 (benchmarks/results/gpu.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ...engine.fsdp.options import ShardingOptions
from ...engine.fsdp.unit import EMBEDDINGS, HEAD, ROOT
from ...engine.moe.chunks import BETWEEN, HALF_RATE_ROWS, HBM, INSIDE, TFLOPS
from ...engine.moe.gemm.backends import MOST_BY_INDEX
from ...engine.planner.activations import LayerActivations
from ...engine.planner.memory import Batch, OptimizerKind
from ...engine.planner.model_sizes import ModelSizes, unit_sizes
from ...engine.planner.traffic import Collective
from ...engine.topology.mesh import Topology

__all__ = ["EAGER", "ERROR", "PACKED", "STREAMED", "Cluster", "Roofline", "roofline", "seconds"]

# Largest relative error of a prediction against a published figure (tests/recipes/plan/test_published.py).
ERROR = 0.16
# Shares of the memory bandwidth: of AdamW, casts and our kernels; of torch's operators, which broadcast and cast; of
# FSDP's packing of gradients (``chunk_cat``).
STREAMED, EAGER, PACKED = 0.76, 0.66, 0.57
_LOGIT = 6  # bytes per logit: read in forward, read and overwritten in backward
_HOST = 9e-3  # seconds per step in which the GPU idles: of 169 ms, 160 were in kernels
_COUNTS = 1e-4  # seconds per layer until the host knows its rows per rank; by arithmetic, not measured
_NEWTON_SCHULZ = 5  # iterations of Muon


@dataclass(frozen=True)
class Cluster:
    """Sizes and rates of a cluster.

    At ``half_rate_rows`` a product runs at half its rate: the factor is ``rows / (rows + half_rate_rows)``.
    """

    nodes: int
    gpus: int  # of a node
    gib: float = 80.0  # of a GPU
    inside: float = INSIDE  # GB/s of a rank to others of its node
    between: float = BETWEEN  # GB/s of a rank's network interface
    tflops: float = TFLOPS  # of bfloat16 matrix products, as published
    efficiency: float = 0.78  # share of tflops that large products reach
    attention: float = 0.2  # share of tflops that attention reaches
    half_rate_rows: float = HALF_RATE_ROWS
    hbm: float = HBM  # GB/s of a GPU's memory, as published

    @property
    def world(self) -> int:
        return self.nodes * self.gpus

    def products(self, flops: float, rows: float = math.inf) -> float:
        """Return the seconds of matrix products."""
        return flops * (1 + self.half_rate_rows / rows) / (self.tflops * self.efficiency * 1e12)

    def passes(self, nbytes: float, share: float) -> float:
        """Return the seconds to read and write ``nbytes`` at a share of the memory bandwidth."""
        return nbytes / (self.hbm * share * 1e9)


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step's parts: FSDP's collectives overlap with the computation, the all-to-alls do not."""

    experts: float = 0.0  # matrix products, and the passes around them
    linears: float = 0.0
    attention: float = 0.0
    dense: float = 0.0  # norms, rotary embeddings, residuals, routers
    head: float = 0.0
    weights: float = 0.0  # casts of parameters, and copies of gathered parameters
    gradients: float = 0.0  # casts and packing
    optimizer: float = 0.0
    norm: float = 0.0  # of the gradients
    waits: float = 0.0  # in which the GPU idles
    all_to_all: float = 0.0  # the part that no other chunk of tokens overlaps
    fsdp: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def compute(self) -> float:
        """Seconds of computation that FSDP's collectives overlap with."""
        return self.experts + self.linears + self.attention + self.dense + self.head + self.weights + self.gradients

    @property
    def step(self) -> float:
        return sum(self.parts.values()) - min(self.fsdp, self.compute)


def seconds(collective: Collective, cluster: Cluster) -> float:
    """Return the time of a collective by the slower of the links in and between nodes, without latency."""
    ranks, nbytes = collective.ranks, collective.nbytes
    if ranks == 1:
        return 0.0
    per_node = max(1, min(ranks, cluster.gpus // collective.stride))
    inside = nbytes * (per_node - 1) / ranks
    between = nbytes * (1 - per_node / ranks)
    if not collective.name.startswith("all-to-all"):
        inside = nbytes * (per_node - 1) / per_node  # a node receives the bytes once and passes them on inside
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
    optimizer: OptimizerKind = "adamw",
) -> Roofline:
    """Return the seconds of a step by part; ``moved`` are its collectives, ``length`` the tokens of a sequence."""
    found = dict.fromkeys((f.name for f in fields(Roofline)), 0.0)
    tokens, element = batch.tokens, options.param_dtype.itemsize
    is_sent = topology.ep * topology.etp > 1  # rows go to experts on other ranks
    counts = iter(sizes.num_experts)
    sharded = unit_sizes(sizes, topology, options.expert_shard_dim)

    def again(stage: str) -> float:
        return float(sizes.traced.checkpointing(stage, options.checkpointing) == "full")

    for stage, unit, size in sharded:
        gathers = 1 + (unit.is_gathered_again and stage != ROOT)
        param, reduce = unit.param_dtype.itemsize, unit.reduce_dtype.itemsize
        if unit.param_dtype != sizes.master:
            found["weights"] += cluster.passes(gathers * size.local * (sizes.master.itemsize + param), STREAMED)
        if size.ranks > 1 or not options.keep_casts:
            found["weights"] += cluster.passes(gathers * 2 * (size.full + size.moved) * param, STREAMED)
        found["gradients"] += cluster.passes(size.reduced * (param + reduce), PACKED)
        if stage == EMBEDDINGS:
            continue
        elements, rows, forwards = float(size.full), float(tokens), 1.0 + again(stage)
        part = "experts" if unit.is_experts else "head" if stage in (ROOT, HEAD) else "linears"
        if unit.is_experts:
            # Balanced routing: a token uses K of the layer's experts, on whichever ranks.
            layer = sizes.traced.layers[stage]
            share = topology.ep * topology.etp * layer.rows / next(counts)
            elements *= share * batch.imbalance
            rows *= share
            if layer.ends_with_experts:  # recomputation stops before their last linear
                sizes_of = {name: math.prod(shape) for name, shape in unit.shapes.items()}
                last = sum(n for name, n in sizes_of.items() if name.endswith("down_proj"))
                forwards -= again(stage) * last / sum(sizes_of.values())
            found["experts"] += cluster.passes(_around_experts(layer, forwards, is_sent) * element * tokens, STREAMED)
        elif part == "head" and sizes.chunked_logits:
            forwards = 2.0  # backward recomputes the tiles
        products = forwards + 1 + size.trained / size.local  # + 1: inputs' gradients; the rest: weights', if trained
        found[part] += cluster.products(products * 2 * elements * tokens, rows)
    found["head"] += cluster.passes(_LOGIT * sizes.outputs * tokens, STREAMED)
    for name, layer in sizes.traced.layers.items():
        # Causal: half of the products, both query-key and weights-values.
        flops = (3.5 + again(name)) * tokens * length * (layer.attention.query + layer.attention.output)
        found["attention"] += flops / (cluster.tflops * cluster.attention * 1e12)
        passes = (1 + again(name)) * layer.passes + layer.passes_backward
        found["dense"] += cluster.passes(passes * tokens, EAGER)
        found["waits"] += _COUNTS if is_sent and layer.rows else 0
    found = {part: took * batch.micro_batches for part, took in found.items()}

    found["waits"] += _HOST
    trained = sum(size.trained for _, _, size in sharded)
    found["norm"] = cluster.passes(trained * sizes.master.itemsize, STREAMED)
    is_muon = optimizer == "muon"
    found["optimizer"] = _optimizer(sizes, topology, options.expert_shard_dim, cluster, trained, is_muon)
    found["fsdp"] = sum(seconds(c, cluster) for c in moved if not c.name.startswith("all-to-all"))
    # The exchange of every chunk but one overlaps with another's computation.
    rows_sent = sum(seconds(c, cluster) for c in moved if c.name == "all-to-all tokens")
    found["all_to_all"] = sum(seconds(c, cluster) for c in moved if c.name.startswith("all-to-all"))
    found["all_to_all"] -= min(rows_sent, found["experts"]) * (1 - 1 / options.dispatch_chunks)
    return Roofline(**found)


def _around_experts(layer: LayerActivations, forwards: float, is_sent: bool) -> float:
    """Return the elements per token that kernels around the experts' products read and write.

    The kernels sum a token's rows in forward and backward, and compute the gate's backward. They copy rows to send, and
    rows that a product with many columns would read too often through an index.
    """
    summed = layer.row_width * (1 + 1 / layer.rows)
    gate_backward = 2 * (layer.pre_width + layer.act_width)
    copied = sum(width > layer.rows * MOST_BY_INDEX for width in (layer.pre_width, layer.act_width))
    sent = forwards + 1 if is_sent else 0
    return 2 * summed + gate_backward + 2 * layer.row_width * (copied + sent)


def _optimizer(
    sizes: ModelSizes, topology: Topology, shard_dim: int | str, cluster: Cluster, trained: int, is_muon: bool
) -> float:
    """Return the seconds of a step of AdamW (reads 4 tensors, writes 3), or of Muon for matrices and AdamW."""
    matrices, flops = 0, 0.0
    for unit in (unit for stage in sizes.stages for unit in stage.units) if is_muon else ():
        for name in (unit.shapes.keys() - unit.frozen) & sizes.matrices.keys():
            matrices += unit.local_numel(name, topology, shard_dim)
            shape, layout = list(unit.shapes[name]), sizes.matrices[name]
            shape[layout.out_dim] //= layout.parts
            few, many = sorted(shape[-2:])
            count = layout.parts * math.prod(shape[:-2])
            flops += count * _NEWTON_SCHULZ * (4 * few**2 * many + 2 * few**3)
    # Muon has one state, so a read and a write less; the ranks of a replica share the matrices.
    passes = (7 * trained - 2 * matrices) * sizes.master.itemsize
    return cluster.passes(passes, STREAMED) + cluster.products(flops / topology.fsdp)
