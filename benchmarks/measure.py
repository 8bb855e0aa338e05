"""Common to benchmarks: their options, random checkpoints, figures of ranks, and sides that take turns."""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.engine.memory import peak_of
from tests.support.ranks import run_ranks

__all__ = [
    "figures_of",
    "in_turns",
    "median_ratio",
    "memory_bytes",
    "options",
    "random_checkpoint",
    "seconds_on_ranks",
    "turns_of",
]


def options(text: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """Return a parser with ``--repeats``, and a module's docstring as its help."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats, help="turns that count")
    return parser


@contextlib.contextmanager
def random_checkpoint(model_type: str, sizes: Mapping[str, Any], **saving: Any) -> Iterator[Path]:
    """Write a checkpoint in float32 with random weights, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
        model.float().save_pretrained(Path(folder) / "model", **saving)
        yield Path(folder) / "model"


def figures_of(measure: Callable[..., Any], world: int, *args: Any, backend: str = "cpu:gloo") -> Any:
    """Call ``measure(*args)`` on ``world`` ranks, and return the first rank's result by way of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        run_ranks(_write, world, out, measure, *args, timeout=1800.0, backend=backend)
        return json.loads(out.read_text())


def _write(out: Path, measure: Callable[..., Any], *args: Any) -> None:
    figures = measure(*args)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(figures))


def turns_of(sides: Iterable[str], repeats: int) -> Iterator[list[str]]:
    """Yield the sides of each turn, and of one before that warms up; each side is the first at times."""
    names = [*sides]
    for turn in range(repeats + 1):
        first = turn % len(names)
        yield names[first:] + names[:first]


def in_turns(sides: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[Any]]:
    """Return what each side's measurements returned, but for the first."""
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for turn in turns_of(sides, repeats):
        for name in turn:
            found[name].append(sides[name]())
    return {name: results[1:] for name, results in found.items()}


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios within a turn."""
    return statistics.median(o / u for o, u in zip(over, under, strict=True))


def seconds_on_ranks(call: Callable[[], object]) -> float:
    """Return seconds of a call until all ranks have ended it; collective."""
    dist.barrier()
    began = time.monotonic()
    call()
    dist.barrier()
    return time.monotonic() - began


def memory_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes that a call allocates at once, on the rank with the most; collective.

    Allocations from before the call are not counted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("call"):
        call()
    most = torch.tensor(peak_of(profiler, "call")[0])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)
