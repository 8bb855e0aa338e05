"""What the plan says: tables of meshes, why the next does not fit, and what would."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from .meshes import Choice, Request, smallest
from .roofline import Cluster

__all__ = ["LEGEND", "LEGEND_OF_ALL", "after_the_best", "print_wrapped", "refusal", "table_of_all", "table_of_best"]

_GIB, _GB = 1 << 30, 1e9
_BEST = 10  # rows of the short table
LEGEND = (
    "states: parameters, gradients and optimizer; GiB on the rank that needs most, at its peak, and in all with the "
    "reserve. received: GB that a rank receives in a step. step: seconds by a roofline, in which nothing waits but for "
    "bandwidth. sync: seconds for a rank to receive the weights that it lacks, in a weight sync."
)
LEGEND_OF_ALL = (
    "GiB on the rank that needs most, at its peak; with the reserve, in all. dense, experts, tokens: GB that a rank "
    "receives in a step (gathers and reductions of the dense part, of the experts, rows to and from experts). Seconds "
    "are a roofline: nothing waits but for bandwidth. sync: seconds for a rank to receive the weights that it lacks."
)
_MESH = ("ep", "ep_fsdp", "dp_replicate", "sp")
_COLUMNS = (*_MESH, "states", "the rest", "in all", "received", "step", "sync")
_PARTS = ("params", "grads", "optim", "buffers", "activ.", "logits")
_COLUMNS_OF_ALL = (*_MESH, *_PARTS, "all", "fits", "dense", "experts", "tokens", "step s", "sync s")


def print_wrapped(console: Console, paragraphs: Sequence[str]) -> None:
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


def table_of_best(found: Sequence[Choice], best: Choice | None) -> Table:
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


def after_the_best(found: Sequence[Choice]) -> list[str]:
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


def table_of_all(found: Sequence[Choice], best: Choice | None) -> Table:
    table = Table(*_COLUMNS_OF_ALL)
    for c in found:
        sizes = [f"{nbytes / _GIB:.1f}" for nbytes in c.peak.parts.values()]
        moved = [f"{c.wire(kind) / _GB:.1f}" for kind in ("dense", "experts", "tokens")]
        row = [*_mesh(c), *sizes, f"{c.gib:.1f}", "yes" if c.fits else "no", *moved]
        table.add_row(*row, f"{c.time.step:.2f}", f"{c.sync:.2f}", style="bold green" if c is best else None)
    return table


def refusal(least: Choice, larger: tuple[Cluster, Choice] | None, request: Request, cluster: Cluster) -> list[str]:
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
        said.append("More nodes do not help; fewer --tokens, or engine.activation_checkpointing=full, may.")
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
        "engine.model_dtype=bf16": replace(request, sizes=bf16),
        "engine.model_dtype=bf16 --optimizer muon": replace(request, sizes=bf16, optimizer="muon"),
    }
    for option, leaner in settings.items():
        found = smallest(leaner, replace(cluster, nodes=cluster.nodes - 1)) if leaner != request else None
        if found is not None and found[0].nodes < nodes:
            yield option, found[0].nodes
