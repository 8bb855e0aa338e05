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
    """A line of the table."""

    what: str
    value: str
    wanted: str = ""  # the condition
    verdict: Literal["right", "low", "wrong", ""] = ""  # low: below what such machines reach; '': no condition
    settings: Sequence[str] = ()  # overrides for a run, each with its reason in parentheses
    cluster: Mapping[str, float] = field(default_factory=dict)  # fields of recipes.plan's Cluster, in its units


@dataclass(frozen=True)
class Ranks:
    """This rank and the others; ranks of a node are neighbours."""

    rank: int
    world: int
    per_node: int
    device: str  # cuda or cpu
    shares_gpu: bool  # with another rank; then the backend is gloo, and no GPU rates are measured
    folder: Path  # on the disk for checkpoints
    note: Callable[[str], None]  # records this rank's next operation, for the report if it hangs

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

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Return the mean seconds of several calls, after warm-up (compilation, connections, autotuning)."""
        for times in (3, 10) if self.has_gpus else (1, 2):
            began = time.perf_counter()
            for _ in range(times):
                call()
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        return seconds / times


@dataclass(frozen=True)
class Check:
    """A check of the doctor: ``judge`` turns what all ranks measure into rows, on rank 0."""

    seconds: float  # time limit on every rank
    measure: Callable[[Ranks], Any]  # collective; the result has to be JSON-serialisable
    judge: Callable[[list[Any], Ranks], Iterable[Row]]


def rate_row(
    what: str, rates: Sequence[float], unit: str, wanted: float | None = None, field_of_cluster: str | None = None
) -> Row:
    """Return a row with the lowest of the ranks' rates, and the ranks that are far below the median.

    ``wanted`` is the smallest right rate, None for unknown hardware. The lowest rate goes to the field of ``Cluster``.
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
