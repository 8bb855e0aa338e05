"""Whether a model fits a cluster, and with which settings, before one is rented.

    python -m epfsdp2.recipes.plan --model Qwen3-30B-A3B --nodes 2 --gpus 8 --gib 80 --tokens 16384 --sequences 4

recommends a mesh, lists the ten best with what they need and the least time of a step, and says why the next does not
fit. ``--all`` lists every legal mesh with its memory by part and its traffic. It needs no GPU and no weights.
"""

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig

from ...engine.errors import SettingError
from ...engine.fsdp.activation_checkpoint import CHECKPOINTING
from ...engine.fsdp.options import ShardingOptions
from ...engine.lora.adapters import Lora
from ...engine.lora.settings import LoraSettings
from ...engine.model.meta import build_on_meta
from ...engine.moe.find import UnsupportedModelError
from ...engine.moe.gemm.backends import BACKENDS
from ...engine.planner.memory import IMBALANCE, Batch, Moment, peak
from ...engine.planner.model_sizes import ModelSizes, group_sizes
from ...engine.planner.text import in_words, step_in_words
from ...engine.planner.traffic import Collective, collectives
from ...engine.topology.mesh import Topology, divisors
from .cards import MODEL_HELP, config_of
from .roofline import Cluster, Roofline, roofline, seconds

__all__ = ["Choice", "choices", "main", "parse", "recommended", "smallest"]

_GIB, _GB = 1 << 30, 1e9
_MOST_NODES = 128
_BEST = 10  # rows of the short table
_WIDTH, _WIDTH_OF_ALL = 100, 150
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LEGEND = (
    "states: parameters, gradients and optimizer; GiB on the rank that needs most, at its peak, and in all with the "
    "reserve. received: GB that a rank receives in a step. step: seconds by a roofline, in which nothing waits but for "
    "bandwidth. sync: seconds for a rank to receive the weights that it lacks, in a weight sync."
)
_LEGEND_OF_ALL = (
    "GiB on the rank that needs most, at its peak; with the reserve, in all. dense, experts, tokens: GB that a rank "
    "receives in a step (gathers and reductions of the dense part, of the experts, rows to and from experts). Seconds "
    "are a roofline: nothing waits but for bandwidth. sync: seconds for a rank to receive the weights that it lacks."
)
_MESH = ("ep", "ep_fsdp", "dp_replicate", "sp")
_COLUMNS = (*_MESH, "states", "the rest", "in all", "received", "step", "sync")
_PARTS = ("params", "grads", "optim", "buffers", "activ.", "logits")
_COLUMNS_OF_ALL = (*_MESH, *_PARTS, "all", "fits", "dense", "experts", "tokens", "step s", "sync s")


@dataclass(frozen=True)
class Request:
    """What is asked: ``batch`` is of one rank with ``sp`` = 1, in ``sequences`` sequences to a micro-batch."""

    sizes: ModelSizes
    options: ShardingOptions
    batch: Batch
    sequences: int
    optimizer: Any = "adamw"
    reserve: float = 4.0
    margin: float = 0.1


@dataclass(frozen=True)
class Choice:
    """One mesh, what it needs and what it takes."""

    topology: Topology
    batch: Batch
    peak: Moment
    traffic: tuple[Collective, ...]
    time: Roofline
    sync: float
    limit: float
    reserve: float

    @property
    def sp(self) -> int:
        return self.batch.sp

    @property
    def gib(self) -> float:
        return self.peak.total / _GIB + self.reserve

    @property
    def fits(self) -> bool:
        return self.gib <= self.limit

    @property
    def settings(self) -> list[str]:
        """As on the command line."""
        fsdp = -1 if self.topology.dp_replicate == 1 else self.topology.fsdp
        values = {"ep_size": self.topology.ep, "fsdp_size": fsdp, "ulysses_sequence_parallel_size": self.sp}
        return [f"engine.{name}={value}" for name, value in values.items()]

    def wire(self, kind: str) -> float:
        """Bytes of a kind that the rank receives in a step."""
        return sum(c.wire for c in self.traffic if c.name.endswith(kind))

    def as_json(self) -> dict[str, Any]:
        t = self.topology
        return {
            "ep": t.ep,
            "ep_fsdp": t.ep_fsdp,
            "dp_replicate": t.dp_replicate,
            "sp": self.sp,
            "settings": self.settings,
            "peak": self.peak.when,
            "bytes": {**self.peak.parts, "total": self.peak.total},
            "gib_with_reserve": self.gib,
            "fits": self.fits,
            "collectives": [{**asdict(c), "wire": c.wire} for c in self.traffic],
            "seconds": {**asdict(self.time), "step": self.time.step, "sync": self.sync},
        }


def choices(request: Request, cluster: Cluster) -> list[Choice]:
    """Every mesh that ``engine/topology/mesh.py`` and ``expert_placement.py`` allow, by time."""
    found = []
    for topology in _topologies(request, cluster.world):
        for sp in divisors(cluster.world):
            if request.sizes.heads % sp == 0 and request.batch.tokens % sp == 0:
                found.append(_choice(request, cluster, topology, sp))
    return sorted(found, key=lambda c: (c.time.step, c.gib))


def _topologies(request: Request, world: int) -> Iterator[Topology]:
    for fsdp in divisors(world):
        for ep in divisors(fsdp):
            topology = Topology.plan(world, ep, fsdp)
            try:
                request.sizes.check(topology)
                group_sizes(request.sizes, topology, request.options.expert_shard_dim)
            except SettingError:
                continue
            yield topology


def _choice(request: Request, cluster: Cluster, topology: Topology, sp: int) -> Choice:
    sizes, options = request.sizes, request.options
    # The ranks of a sequence share its micro-batch, so each has as many more of them.
    given = request.batch
    batch = replace(given, tokens=given.tokens // sp, micro_batches=given.micro_batches * sp, sp=sp)
    length = request.batch.tokens // request.sequences
    return Choice(
        topology,
        batch,
        peak(sizes, topology, options, batch, request.optimizer),
        tuple(collectives(sizes, topology, options, batch)),
        roofline(sizes, topology, options, batch, cluster, length),
        _sync(sizes, topology, options, cluster),
        cluster.gib * (1 - request.margin),
        request.reserve,
    )


def _sync(sizes: ModelSizes, topology: Topology, options: ShardingOptions, cluster: Cluster) -> float:
    """Seconds of the full stream: every rank receives what it does not hold (``plan_sync`` has the others)."""
    itemsize = options.param_dtype.itemsize
    whole = sum(size.full for _, _, size in group_sizes(sizes, Topology.plan(1, 1))) * itemsize
    return seconds(Collective("all-gather", topology.fsdp, 1, 1, whole), cluster)


def recommended(found: Sequence[Choice]) -> Choice | None:
    """The fastest that fits."""
    return next((choice for choice in found if choice.fits), None)


def smallest(request: Request, cluster: Cluster) -> tuple[Cluster, Choice] | None:
    """The fewest nodes of the same shape on which the model fits, and how."""
    alone = Topology.plan(1, 1)
    elements = sum(size.full for _, _, size in group_sizes(request.sizes, alone))
    states = 1 if request.optimizer == "muon" else 2
    resident = (2 + states) * elements * request.sizes.master.itemsize / _GIB
    for nodes in range(cluster.nodes + 1, _MOST_NODES + 1):
        larger = replace(cluster, nodes=nodes)
        if resident / larger.world + request.reserve > cluster.gib * (1 - request.margin):
            continue
        best = recommended(choices(request, larger))
        if best is not None:
            return larger, best
    return None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.plan",
        description="Whether a model fits a cluster, and with which settings: memory, traffic and time of a step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help=MODEL_HELP)
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the cluster")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a node")
    parser.add_argument("--gib", type=float, default=Cluster.gib, help="memory of a GPU (H100 80, H200 141)")
    parser.add_argument("--inside", type=float, default=Cluster.inside, help="GB/s of a GPU to others of its node")
    parser.add_argument("--between", type=float, default=Cluster.between, help="GB/s of a GPU's network interface")
    parser.add_argument(
        "--tflops", type=float, default=Cluster.tflops, help="bfloat16 matrix TFLOP/s, as published (H100, H200)"
    )
    parser.add_argument("--efficiency", type=float, default=Cluster.efficiency, help="share of these that is reached")
    parser.add_argument("--hbm", type=float, default=Cluster.hbm, help="GB/s of a GPU's memory (H200 4800)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch of a rank (before sp cuts it)")
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-batch, of equal length")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a rank in a step (with sp = 1)")
    parser.add_argument(
        "--imbalance", type=float, default=IMBALANCE, help="rows of the busiest rank's experts over the mean"
    )
    parser.add_argument(
        "--checkpointing", choices=CHECKPOINTING, default="full", help="engine.activation_checkpointing"
    )
    parser.add_argument("--prefetch-depth", type=int, default=1, help="engine.prefetch_depth")
    parser.add_argument("--no-reshard", action="store_true", help="engine.reshard_after_forward=false")
    parser.add_argument(
        "--reshard-experts",
        choices=["true", "false"],
        help="engine.reshard_experts_after_forward; as the rest if not given",
    )
    parser.add_argument(
        "--expert-shard-dim", choices=["auto", "0", "1"], default="auto", help="engine.expert_shard_dim"
    )
    parser.add_argument("--dispatch-chunks", type=int, default=1, help="engine.dispatch_chunks")
    parser.add_argument("--experts-backend", choices=BACKENDS, default="auto", help="engine.experts_backend")
    parser.add_argument("--lora-rank", type=int, default=0, help="model.lora_rank, of adapters on all linears")
    parser.add_argument("--model-dtype", choices=_DTYPES, default="fp32", help="engine.model_dtype")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="engine.mixed_precision.param_dtype")
    parser.add_argument("--reduce-dtype", choices=_DTYPES, default="fp32", help="engine.mixed_precision.reduce_dtype")
    parser.add_argument("--activation-offload", action="store_true", help="model.enable_activation_offload")
    parser.add_argument("--offload-policy", action="store_true", help="engine.offload_policy")
    parser.add_argument("--fused-kernels", action="store_true", help="model.use_fused_kernels: no logits are held")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw", help="whose states are counted")
    parser.add_argument("--reserve", type=float, default=4.0, help="GiB for contexts, NCCL and a sleeping vLLM")
    parser.add_argument("--margin", type=float, default=0.1, help="share of the memory that has to stay free")
    parser.add_argument("--all", action="store_true", help="list every legal mesh, in 150 columns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw who holds what, of the recommended mesh")
    options = parser.parse_args(arguments)
    for name in ("nodes", "gpus", "tokens", "sequences", "micro_batches", "dispatch_chunks"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it has to be at least 1")
    for name in ("gib", "inside", "between", "tflops", "efficiency", "hbm"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} is {getattr(options, name)}; it has to be positive")
    if options.tokens % options.sequences:
        parser.error(f"--sequences is {options.sequences}, which does not divide --tokens, {options.tokens}")
    if options.imbalance < 1:
        parser.error(f"--imbalance is {options.imbalance}; the busiest rank has at least the mean: 1 or more")
    if not 0 <= options.margin < 1 or min(options.reserve, options.prefetch_depth, options.lora_rank) < 0:
        parser.error("--margin is a share from 0 to 1; --reserve, --prefetch-depth and --lora-rank are at least 0")
    return options


def request_of(options: argparse.Namespace, config: PretrainedConfig) -> Request:
    """
    Raises:
        UnsupportedModelError: its experts can't be dispatched, or it can't be traced.
    """
    dim, experts = options.expert_shard_dim, options.reshard_experts
    sharding = ShardingOptions(
        param_dtype=_DTYPES[options.dtype],
        reduce_dtype=_DTYPES[options.reduce_dtype],
        reshard_after_forward=not options.no_reshard,
        reshard_experts_after_forward=None if experts is None else experts == "true",
        prefetch_depth=options.prefetch_depth,
        expert_shard_dim=dim if dim == "auto" else int(dim),
        dispatch_chunks=options.dispatch_chunks,
        experts_backend=options.experts_backend,
        checkpointing=options.checkpointing,
        activation_offload=options.activation_offload,
        head_in_root=options.fused_kernels,
        cpu_offload=options.offload_policy,
    )

    def build(dtype: torch.dtype) -> Any:
        model: Any = build_on_meta(AutoModelForCausalLM, config, dtype)
        if options.lora_rank:
            Lora(model, LoraSettings("model", options.lora_rank, options.lora_rank, "all-linear"))
        return model

    return Request(
        ModelSizes.built_by(build, sharding, _DTYPES[options.model_dtype]).require_traced(),
        sharding,
        Batch(options.tokens, options.micro_batches, options.imbalance),
        options.sequences,
        options.optimizer,
        options.reserve,
        options.margin,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False, soft_wrap=True, width=_WIDTH_OF_ALL if options.all else _WIDTH)
    names = ("nodes", "gpus", "gib", "inside", "between", "tflops", "efficiency", "hbm")
    cluster = Cluster(**{name: getattr(options, name) for name in names})
    try:
        request = request_of(options, config_of(options.model))
    except (SettingError, UnsupportedModelError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    found = choices(request, cluster)
    best = recommended(found)
    said = [
        f"{options.model} on {cluster.nodes} x {cluster.gpus} GPUs of {cluster.gib:g} GiB, {request.margin:.0%} to "
        f"stay free: {options.checkpointing} checkpointing, {options.model_dtype} parameters, {options.optimizer}, "
        f"{step_in_words(request.batch)}"
    ]
    larger = None
    if best is not None:
        said.append(f"Recommended, {best.gib:.1f} of {cluster.gib:g} GiB and {best.time.step:.2f} s a step:")
        said += [f"    {' '.join(best.settings)}"]
        said += in_words(best.topology, best.batch, best.peak, best.traffic)
    else:
        larger = smallest(request, cluster)
        said += _refusal(min(found, key=lambda c: c.gib), larger, request, cluster)
    if not request.sizes.num_experts:
        said.append("ep is 1: the model has no experts.")
    if request.sizes.unshared:
        said.append(f"sp is 1: {request.sizes.unshared}")
    _print(console, said)
    if options.all:
        console.print(_table_of_all(found, best))
        _print(console, [_LEGEND_OF_ALL])
    else:
        console.print(_table(found, best))
        _print(console, [*_next(found), _LEGEND])
    if options.json:
        result = {
            "model": options.model,
            "cluster": asdict(cluster),
            "choices": [choice.as_json() for choice in found],
            "recommended": best.as_json() if best else None,
            "smallest_cluster": {"nodes": larger[0].nodes, **larger[1].as_json()} if larger else None,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.png:
        from .figure import draw

        draw(options.model, request.sizes, best or found[0], cluster, options.png)
    return 0 if best else 2


def _print(console: Console, paragraphs: Sequence[str]) -> None:
    for text in paragraphs:
        lines = textwrap.wrap(
            text,
            console.width,
            subsequent_indent="    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        console.print("\n".join(line.rstrip() for line in lines), markup=False)


def _mesh(choice: Choice) -> list[str]:
    t = choice.topology
    return [str(size) for size in (t.ep, t.ep_fsdp, t.dp_replicate, choice.sp)]


def _table(found: Sequence[Choice], best: Choice | None) -> Table:
    """The fastest that fit; where none does, those that need least."""
    shown = [c for c in found if c.fits] or sorted(found, key=lambda c: c.gib)
    table = Table(*_COLUMNS)
    for c in shown[:_BEST]:
        states = c.peak.parameters + c.peak.gradients + c.peak.optimizer
        received = sum(one.wire for one in c.traffic)
        sizes = [f"{nbytes / _GIB:.1f}" for nbytes in (states, c.peak.total - states)]
        row = [*_mesh(c), *sizes, f"{c.gib:.1f}", f"{received / _GB:.1f}", f"{c.time.step:.2f}", f"{c.sync:.2f}"]
        table.add_row(*row, style="bold green" if c is best else None)
    return table


def _next(found: Sequence[Choice]) -> list[str]:
    """Why the fastest of those that don't fit does not, and what else there is."""
    fit = [c for c in found if c.fits]
    said = []
    if fit and len(fit) < len(found):
        c = next(c for c in found if not c.fits)
        room = c.limit - c.reserve
        parts = sorted(c.peak.parts.items(), key=lambda part: -part[1])[:2]
        largest = " and ".join(f"{name} {nbytes / _GIB:.1f}" for name, nbytes in parts)
        said.append(
            f"The next, {c.time.step:.2f} s a step, does not fit: {' '.join(c.settings)} needs "
            f"{c.peak.total / _GIB:.1f} GiB of the {room:.1f} that a rank's tensors may have, of which {largest}."
        )
    hidden = len(found) - min(len(fit) or len(found), _BEST)
    said.append(f"{len(fit)} of {len(found)} meshes fit" + (f"; --all lists all {len(found)}." if hidden else "."))
    return said


def _table_of_all(found: Sequence[Choice], best: Choice | None) -> Table:
    table = Table(*_COLUMNS_OF_ALL)
    for c in found:
        sizes = [f"{nbytes / _GIB:.1f}" for nbytes in c.peak.parts.values()]
        moved = [f"{c.wire(kind) / _GB:.1f}" for kind in ("dense", "experts", "tokens")]
        row = [*_mesh(c), *sizes, f"{c.gib:.1f}", "yes" if c.fits else "no", *moved]
        table.add_row(*row, f"{c.time.step:.2f}", f"{c.sync:.2f}", style="bold green" if c is best else None)
    return table


def _refusal(least: Choice, larger: tuple[Cluster, Choice] | None, request: Request, cluster: Cluster) -> list[str]:
    """What is too big, in which mesh, and what would do."""
    parts = sorted(least.peak.parts.items(), key=lambda part: -part[1])
    room = least.limit - least.reserve
    said = [
        f"It does not fit. Of {cluster.gib:g} GiB {room:.1f} are for a rank's tensors ({request.margin:.0%} stay free, "
        f"{least.reserve:g} GiB are reserved), and every mesh needs more.",
        f"The least is {least.peak.total / _GIB:.1f} GiB, with {' '.join(least.settings)} ({least.peak.when}): "
        + ", ".join(f"{name} {nbytes / _GIB:.1f}" for name, nbytes in parts if nbytes)
        + ".",
    ]
    alone = [name for name, nbytes in parts if nbytes / _GIB > room]
    if alone:
        said.append(f"Too big each by itself: {', '.join(alone)}.")
    else:
        said.append(f"The largest part is {parts[0][0]}.")
    if larger is None:
        said.append("More nodes do not help; fewer --tokens, or fuller --checkpointing, may.")
        return said
    nodes, best = larger
    said.append(
        f"The smallest cluster of such nodes that fits has {nodes.nodes} ({nodes.world} GPUs), {best.gib:.1f} GiB each "
        f"with the reserve: {' '.join(best.settings)}"
    )
    fewer = [f"{nodes} with {option}" for option, nodes in _leaner(request, cluster, nodes.nodes)]
    if fewer:
        said.append(f"Fewer do with other settings: {', '.join(fewer)}.")
    return said


def _leaner(request: Request, cluster: Cluster, nodes: int) -> Iterator[tuple[str, int]]:
    """Settings that make the states smaller, and how many nodes do then; those that save any."""
    bf16 = replace(request.sizes, master=torch.bfloat16)
    settings = {
        "--optimizer muon": replace(request, optimizer="muon"),
        "--model-dtype bf16": replace(request, sizes=bf16),
        "--model-dtype bf16 --optimizer muon": replace(request, sizes=bf16, optimizer="muon"),
    }
    for option, leaner in settings.items():
        found = smallest(leaner, replace(cluster, nodes=cluster.nodes - 1)) if leaner != request else None
        if found is not None and found[0].nodes < nodes:
            yield option, found[0].nodes
