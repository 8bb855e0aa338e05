"""Print and draw the plan: tables of meshes, why the next does not fit, alternatives, and the shards of each rank."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ...engine.planner.model_sizes import ModelSizes
from ...engine.topology.mesh import Topology
from .meshes import Choice, Request, smallest
from .roofline import Cluster, Roofline

__all__ = ["after_the_best", "draw", "print_wrapped", "refusal", "table", "time_by_part"]

_GIB, _GB = 1 << 30, 1e9
_BEST = 10  # rows of the short table
_RANKS = 64  # drawn at most
_MESH = ("ep", "etp", "ep_fsdp", "dp_replicate", "sp")
_COLUMNS = (*_MESH, "states", "the rest", "in all", "received", "step", "sync")
_PARTS = ("params", "grads", "optim", "buffers", "activ.", "logits")
_COLUMNS_OF_ALL = (*_MESH, *_PARTS, "all", "fits", "dense", "experts", "tokens", "step s", "sync s")
_LEGEND = (
    "{}GiB on the rank that needs most, at its peak, and in all with the reserve. {}: GB that a rank receives. "
    "step: seconds, the sum of a step's parts as predicted. sync: seconds for a rank to receive the "
    "weights that it lacks, in a weight sync."
)
_STATES = "states: parameters, gradients and optimizer; "
_KINDS = "dense, experts, tokens (gathers and reductions of the dense part, of the experts, rows to and from experts)"


def print_wrapped(console: Console, paragraphs: Sequence[str]) -> None:
    wrapper = textwrap.TextWrapper(
        console.width, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
    for text in paragraphs:
        console.print("\n".join(line.rstrip() for line in wrapper.wrap(text)), markup=False)


def table(found: Sequence[Choice], best: Choice | None, is_all: bool) -> tuple[Table, str]:
    """Return a table and its legend: all meshes, or the fastest that fit, or without any the smallest."""
    shown = found if is_all else ([c for c in found if c.fits] or sorted(found, key=lambda c: c.gib))[:_BEST]
    made = Table(*(_COLUMNS_OF_ALL if is_all else _COLUMNS))
    for c in shown:
        t, parts = c.topology, list(c.peak.parts.values())
        states = c.peak.parameters + c.peak.gradients + c.peak.optimizer
        held = parts if is_all else [states, c.peak.total - states]
        moved = [c.wire(kind) for kind in (("dense", "experts", "tokens") if is_all else ("",))]
        row = [*map(str, (t.ep, t.etp, t.ep_fsdp, t.dp_replicate, c.sp)), *(f"{n / _GIB:.1f}" for n in held)]
        row += [f"{c.gib:.1f}", *(["yes" if c.fits else "no"] if is_all else [])]
        row += [*(f"{n / _GB:.1f}" for n in moved), f"{c.time.step:.2f}", f"{c.sync:.2f}"]
        made.add_row(*row, style="bold green" if c is best else None)
    return made, _LEGEND.format("", _KINDS) if is_all else _LEGEND.format(_STATES, "received")


def time_by_part(time: Roofline) -> str:
    """Return a line with the seconds of each part of a step, and the part of FSDP's collectives that overlaps."""
    parts = [f"{name.replace('_', '-')} {seconds:.3g}" for name, seconds in time.parts.items() if seconds]
    return f"seconds of a step: {' + '.join(parts)}, less {min(time.fsdp, time.compute):.3g} of fsdp's beside the rest"


def after_the_best(found: Sequence[Choice]) -> list[str]:
    """Explain why the fastest of the meshes that don't fit does not, and name the alternatives."""
    fit = [c for c in found if c.fits]
    said = []
    if fit and len(fit) < len(found):
        c = next(c for c in found if not c.fits)
        said.append(
            f"The next, {c.time.step:.2f} s a step, does not fit: {' '.join(c.settings)} needs "
            f"{c.peak.total / _GIB:.1f} GiB of the {c.room:.1f} that a rank's tensors may have, of which "
            f"{' and '.join(_largest(c)[:2])}."
        )
    hidden = len(found) - min(len(fit) or len(found), _BEST)
    said.append(f"{len(fit)} of {len(found)} meshes fit" + (f"; --all lists all {len(found)}." if hidden else "."))
    return said


def refusal(least: Choice, larger: tuple[Cluster, Choice] | None, request: Request, cluster: Cluster) -> list[str]:
    """Explain which part is too large on the smallest mesh, and name clusters and settings that fit."""
    said = [
        f"It does not fit. Of {cluster.gib:g} GiB {least.room:.1f} are for a rank's tensors ({request.margin:.0%} stay "
        f"free, {least.reserve:g} GiB are reserved), and every mesh needs more.",
        f"The least is {least.peak.total / _GIB:.1f} GiB, with {' '.join(least.settings)} ({least.peak.when}): "
        f"{', '.join(_largest(least))}.",
    ]
    alone = [name for name, nbytes in least.peak.parts.items() if nbytes / _GIB > least.room]
    if alone:
        said.append(f"Too big each by itself: {', '.join(alone)}.")
    if larger is None:
        return [*said, "More nodes do not help; fewer --tokens, or engine.activation_checkpointing=full, may."]
    nodes, best = larger
    said.append(
        f"The smallest cluster of such nodes that fits has {nodes.nodes} ({nodes.world} GPUs), {best.gib:.1f} GiB each "
        f"with the reserve: {' '.join(best.settings)}"
    )
    fewer = ", ".join(_leaner(request, cluster, nodes.nodes))
    return [*said, f"Fewer do with other settings: {fewer}."] if fewer else said


def _largest(choice: Choice) -> list[str]:
    """Return the parts of the memory as text, the largest first."""
    parts = sorted(choice.peak.parts.items(), key=lambda part: -part[1])
    return [f"{name} {nbytes / _GIB:.1f}" for name, nbytes in parts if nbytes]


def _leaner(request: Request, cluster: Cluster, nodes: int) -> Iterator[str]:
    """Yield settings with smaller states and the nodes they need, if fewer than ``nodes``."""
    bf16 = replace(request.sizes, master=torch.bfloat16)
    settings = {
        "--optimizer muon": replace(request, optimizer="muon"),
        "engine.model_dtype=bf16": replace(request, sizes=bf16),
        "engine.model_dtype=bf16 --optimizer muon": replace(request, sizes=bf16, optimizer="muon"),
    }
    for option, leaner in settings.items():
        found = smallest(leaner, replace(cluster, nodes=cluster.nodes - 1)) if leaner != request else None
        if found is not None and found[0].nodes < nodes:
            yield f"{found[0].nodes} with {option}"


def draw(model: str, sizes: ModelSizes, choice: Choice, cluster: Cluster, path: Path) -> None:
    """Write a PNG: ranks by node with their experts, and the memory of one rank by part."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    t = choice.topology
    shown, per_row = min(t.world, _RANKS), cluster.gpus
    rows = -(-shown // per_row)
    figure, (ranks, memory) = plt.subplots(
        2, 1, figsize=(max(8, 1.5 * per_row), 2.5 + rows), layout="constrained", height_ratios=[rows, 1.2]
    )
    colours = plt.get_cmap("viridis")
    for rank in range(shown):
        column, row = rank % per_row, rows - 1 - rank // per_row
        at = t.coordinate(rank % t.fsdp)
        ranks.add_patch(Rectangle((column, row), 0.95, 0.9, color=colours(at["ep"] / max(t.ep, 2)), alpha=0.35))
        ranks.text(column + 0.47, row + 0.45, _held(rank, t, sizes), ha="center", va="center", fontsize=7)
    more = f" (the first {shown} of {t.world} ranks)" if shown < t.world else ""
    ranks.set(
        xlim=(0, per_row), ylim=(0, rows), xticks=[], ylabel="node", title=f"{model}: {' '.join(choice.settings)}{more}"
    )
    ranks.set_yticks([rows - 0.55 - i for i in range(rows)], [str(i) for i in range(rows)])

    left = 0.0
    for part, nbytes in {**choice.peak.parts, "reserve": choice.reserve * _GIB}.items():
        memory.barh(0, nbytes / _GIB, left=left, label=f"{part} {nbytes / _GIB:.1f}")
        left += nbytes / _GIB
    memory.axvline(cluster.gib, color="tab:red", linestyle="--", label=f"a GPU, {cluster.gib:g}")
    memory.set(yticks=[], xlabel=f"GiB of a rank at its peak ({choice.peak.when})")
    memory.legend(ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.45))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _held(rank: int, topology: Topology, sizes: ModelSizes) -> str:
    """Return a label of a rank's shards, in at most three lines."""
    at = topology.coordinate(rank % topology.fsdp)
    experts = max(sizes.num_experts, default=0) // topology.ep
    parts = topology.ep_fsdp * topology.etp
    cut = f"1/{parts} of " if parts > 1 else ""
    copy = f"copy {rank // topology.fsdp}, " if topology.dp_replicate > 1 else ""
    first = at["ep"] * experts
    if not experts:
        return f"rank {rank}\n{copy}1/{topology.fsdp} of the model"
    return f"rank {rank}\n{cut}experts {first}-{first + experts - 1}\n{copy}1/{topology.fsdp} of the rest"
