"""The parts of a check: its ranks, their measurements, and the rows of the table."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...engine.errors import first_of

__all__ = ["NEEDS_A_GPU", "Check", "Ranks", "Row", "rate_row", "verdict_of"]

NEEDS_A_GPU = "needs a GPU for each rank"
_BEHIND = 0.85  # of the median; slower ranks are named


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        wanted: condition that the value is compared with; '' for none.
        verdict: ``wrong`` is a failure; ``low`` is a rate or an amount below the usual of such machines; '' without a
            condition.
        settings: overrides for a run, each with its reason in parentheses.
        cluster: fields of ``recipes/plan/roofline.py``'s ``Cluster``, in its units.
    """

    what: str
    value: str
    wanted: str = ""
    verdict: Literal["right", "low", "wrong", ""] = ""
    settings: Sequence[str] = ()
    cluster: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranks:
    """This rank and the others; ranks of a node are neighbours.

    Args:
        per_node: ranks of each node.
        device: ``cuda`` or ``cpu``.
        shares_gpu: whether ranks of a node share a GPU; then the backend is gloo, and no GPU rates are measured.
        folder: on the disk for checkpoints.
        note: records this rank's next operation, for the report if it hangs.
    """

    rank: int
    world: int
    per_node: int
    device: str
    shares_gpu: bool
    folder: Path
    note: Callable[[str], None]

    @property
    def nodes(self) -> int:
        return self.world // self.per_node

    @property
    def has_gpus(self) -> bool:
        """Whether each rank has a GPU of its own, so that measured rates are a GPU's."""
        return self.device == "cuda" and not self.shares_gpu

    @cached_property
    def inside(self) -> dist.ProcessGroup:
        """The group of this node's ranks, like an ``ep`` group; collective at its first use."""
        return dist.new_subgroups_by_enumeration(torch.arange(self.world).view(-1, self.per_node).tolist())[0]

    @cached_property
    def between(self) -> dist.ProcessGroup:
        """The group of the ranks with this local rank on each node; collective at its first use."""
        return dist.new_subgroups_by_enumeration(torch.arange(self.world).view(-1, self.per_node).T.tolist())[0]

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Return the mean seconds of several calls, after warm-up (compilation, connections, autotuning)."""
        for _ in range(3 if self.has_gpus else 1):
            call()
        self.synchronize()
        times = 10 if self.has_gpus else 2
        began = time.perf_counter()
        for _ in range(times):
            call()
        self.synchronize()
        return (time.perf_counter() - began) / times


@dataclass(frozen=True)
class Check:
    """A check of the doctor.

    Args:
        seconds: time limit on every rank.
        measure: runs on every rank; collective. The result has to be JSON-serialisable.
        judge: turns the measurements of all ranks into rows, on rank 0.
    """

    seconds: float
    measure: Callable[[Ranks], Any]
    judge: Callable[[list[Any], Ranks], Iterable[Row]]


def rate_row(
    what: str, rates: Sequence[float], unit: str, wanted: float | None = None, field_of_cluster: str | None = None
) -> Row:
    """Return a row with the lowest of the ranks' rates, and the ranks that are far below the median.

    Args:
        wanted: smallest right rate; None for unknown hardware.
        field_of_cluster: field of ``Cluster`` that the lowest rate goes to.
    """
    lowest, middle = min(rates), sorted(rates)[len(rates) // 2]
    behind = [str(rank) for rank, rate in enumerate(rates) if rate < _BEHIND * middle]
    named = f" (median {_short(middle)}; behind: rank {', '.join(first_of(behind, 4))})" if behind else ""
    cluster = {field_of_cluster: float(f"{lowest:.4g}")} if field_of_cluster else {}
    shown = f">= {_short(wanted)}" if wanted else ""
    return Row(what, f"{_short(lowest)} {unit}{named}", shown, verdict_of(lowest, wanted), cluster=cluster)


def _short(value: float) -> str:
    """Format with three significant digits, without an exponent below a million."""
    return f"{float(f'{value:.3g}'):g}"


def verdict_of(value: float, wanted: float | None) -> Literal["right", "low", ""]:
    """Compare an amount with the smallest right one; None for no condition."""
    return "" if wanted is None else "right" if value >= wanted else "low"
