"""Print the plan: tables of meshes, why the next does not fit, and alternatives."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from .meshes import Choice, Request, smallest
from .roofline import Cluster, Roofline

__all__ = ["after_the_best", "print_wrapped", "refusal", "table", "time_by_part"]

_GIB, _GB = 1 << 30, 1e9
_BEST = 10  # rows of the short table
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
        row = [
            *map(str, (t.ep, t.etp, t.ep_fsdp, t.dp_replicate, c.sp)),
            *(f"{n / _GIB:.1f}" for n in held),
            f"{c.gib:.1f}",
        ]
        row += ["yes" if c.fits else "no"] if is_all else []
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
    fewer = [f"{nodes} with {option}" for option, nodes in _leaner(request, cluster, nodes.nodes)]
    return [*said, f"Fewer do with other settings: {', '.join(fewer)}."] if fewer else said


def _largest(choice: Choice) -> list[str]:
    """Return the parts of the memory as text, the largest first."""
    parts = sorted(choice.peak.parts.items(), key=lambda part: -part[1])
    return [f"{name} {nbytes / _GIB:.1f}" for name, nbytes in parts if nbytes]


def _leaner(request: Request, cluster: Cluster, nodes: int) -> Iterator[tuple[str, int]]:
    """Yield settings with smaller states, and the nodes they need, if fewer than ``nodes``."""
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
