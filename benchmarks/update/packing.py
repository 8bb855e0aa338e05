"""What packed rows cost: attention per sequence beside one mask of the row, and packed beside padded batches.

    python -m benchmarks.update.packing [--repeats 5] [--models softmax linear]

Two ranks on a CPU, experts over both, float32, one thread each. Updates of verl's own worker, sides in turns in the
same processes. First, rows of 4,096 tokens as 4 and as 16 sequences: attention once for each sequence, beside the dense
mask of all pairs that transformers hands sdpa, and beside no attention at all, which no way to attend is faster than.
Then sequences whose lengths are uniform up to the longest: packed rows beside a padded batch, for a softmax and for a
linear-attention family. Last, what it costs to call linear attention once for each sequence: beside one call for the
row, whose state runs on from one sequence into the next.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from benchmarks.machine import machine
from benchmarks.tables import newest, write_table
from benchmarks.update.step import MODEL
from epfsdp2.engine.integration import building
from epfsdp2.engine.packing import attention, sequences
from epfsdp2.engine.packing.attention import PackedAttention
from epfsdp2.engine.packing.sequences import find_mixers
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import PADDED, Sample, of_this_rank, ppo_batch, ppo_worker

WORLD, ROW = 2, 4096
COLUMNS = ["model", "sequences of a rank", "side", "update s", "tokens/s", "speedup", "commit"]
MODELS = {"softmax": "Qwen3-MoE", "linear": "Qwen3-Next"}
LEAST = {"4 x 1,024": 1.7, "16 x 256": 3.0}  # speedups over the first side
OF_THE_MOST = 0.9  # of an update without attention, where that is below the bound
LEAST_OVER_PADDED = 1.6
MOST_OVER_ONE_CALL = 1.15
SPREAD = 16  # sequences of a rank with lengths from 1 to LONGEST
LONGEST = 512
LINEAR = {
    **MODEL,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "shared_expert_intermediate_size": 512,
}
DENSE, PACKED, PADDED_ROWS = "one mask of the row", "per sequence", "padded"
ONE_CALL, NOTHING = "one call for the row", "no attention"


class _NoAttention(PackedAttention):
    """Adds queries, keys and values up, so that all of them have gradients."""

    def attend(self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        both = (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
        return (query + both).transpose(1, 2), None


def samples_of(lengths: Sequence[int], vocabulary: int) -> list[Sample]:
    """Samples of these lengths for each rank; a quarter of each is its prompt."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in list(lengths) * WORLD:
        before = max(1, length // 4)
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        old = -8.0 - torch.rand(length - before, generator=generator)
        samples.append((ids, before, old, torch.randn(length - before, generator=generator)))
    return samples


def cases(
    models: Collection[str], row: int = ROW, longest: int = LONGEST
) -> dict[str, tuple[str, list[int], tuple[str, ...]]]:
    """By name: the model, the lengths of a rank's sequences, and the sides, the first of which is compared with."""
    generator = torch.Generator().manual_seed(1)
    spread = (torch.randint(2, longest + 1, (SPREAD,), generator=generator)).tolist()
    ways = (DENSE, PACKED, NOTHING)
    every = {
        f"4 x {row // 4:,}": ("softmax", [row // 4] * 4, ways),
        f"16 x {row // 16:,}": ("softmax", [row // 16] * 16, ways),
        f"{SPREAD} x 2 to {longest}": ("softmax", spread, (PADDED_ROWS, PACKED)),
        f"{SPREAD} x 2 to {longest}, linear": ("linear", spread, (PADDED_ROWS, PACKED)),
        f"{SPREAD} x {longest}, linear": ("linear", [longest] * SPREAD, (ONE_CALL, PACKED)),
    }
    return {name: case for name, case in every.items() if case[0] in models}


@contextlib.contextmanager
def _built(side: str) -> Iterator[dict[str, Any]]:
    """What a worker's model is built with."""
    if side == PADDED_ROWS:
        yield PADDED
    elif side == DENSE:
        with mock.patch.object(building, "PackedSequences", lambda module, longest: None):
            yield {}
    elif side == NOTHING:
        with mock.patch.object(attention, "PackedAttention", _NoAttention):
            yield {}
    elif side == ONE_CALL:
        with mock.patch.object(sequences, "find_mixers", lambda model: replace(find_mixers(model), others={})):
            yield {}
    else:
        yield {}


def measure(folders: dict[str, Path], out: Path, repeats: int, models: Collection[str], sizes: tuple[int, int]) -> None:
    """Rank 0 writes seconds of an update of each turn, by case and side."""
    figures: dict[str, dict[str, list[float]]] = {}
    for case, (model, lengths, sides) in cases(models, *sizes).items():
        samples = samples_of(lengths, AutoConfig.from_pretrained(folders[model]).vocab_size)
        workers = {}
        for side in sides:
            with _built(side) as settings:
                workers[side] = ppo_worker(folders[model], WORLD, micro_batch=len(lengths), model=settings)
        figures[case] = {side: [] for side in sides}
        for turn in range(repeats + 1):
            for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                seconds = _update(workers[side], samples)
                if turn:
                    figures[case][side].append(seconds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(figures))


def _update(worker: Any, samples: Sequence[Sample]) -> float:
    prompt, response = (max(n) for n in zip(*((b, len(ids) - b) for ids, b, *_ in samples), strict=True))
    batch = ppo_batch(of_this_rank(worker, samples), len(samples), prompt, response)
    dist.barrier()
    began = time.monotonic()
    worker.train_batch(batch)
    dist.barrier()
    return time.monotonic() - began


def run(
    repeats: int,
    softmax: dict[str, Any] = MODEL,
    linear: dict[str, Any] = LINEAR,
    models: Collection[str] = tuple(MODELS),
    sizes: tuple[int, int] = (ROW, LONGEST),
) -> list[dict[str, Any]]:
    """Both models, made from a seed.

    Args:
        models: whose cases are measured.
        sizes: tokens of a row, and of the longest sequence of those with different lengths.
    """
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("softmax", "linear")}
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**softmax)).float().save_pretrained(folders["softmax"])
        Qwen3NextForCausalLM(Qwen3NextConfig(**linear)).float().save_pretrained(folders["linear"])
        out = Path(name) / "figures.json"
        run_ranks(measure, WORLD, folders, out, repeats, models, sizes, timeout=3000)
        figures = json.loads(out.read_text())
    rows: list[dict[str, Any]] = []
    for case, (model, lengths, sides) in cases(models, *sizes).items():
        speedups = {side: _speedup(figures[case][sides[0]], figures[case][side]) for side in sides}
        for side, speedup in speedups.items():
            seconds = figures[case][side]
            rows.append(
                {
                    "model": MODELS[model],
                    "case": case.removesuffix(", linear"),
                    "side": side,
                    "update": statistics.median(seconds),
                    "tokens_per_second": WORLD * sum(lengths) / statistics.median(seconds),
                    "speedup": speedup,
                    "holds": side != PACKED or speedup >= _least(case, speedups),
                }
            )
    return rows


def _speedup(before: list[float], seconds: list[float]) -> float:
    return statistics.median(b / s for b, s in zip(before, seconds, strict=True))


def _least(case: str, speedups: dict[str, float]) -> float:
    if ONE_CALL in speedups:
        return 1 / MOST_OVER_ONE_CALL
    least = LEAST.get(case, LEAST_OVER_PADDED)
    return min(least, OF_THE_MOST * speedups[NOTHING]) if NOTHING in speedups else least


def cells(row: dict[str, Any]) -> list[str]:
    speedup = f"{row['speedup']:.2f} x" + ("" if row["holds"] else " (below the bound)")
    figures = [f"{row['update']:.2f}", f"{row['tokens_per_second']:.0f}", speedup]
    return [row["model"], row["case"], row["side"], *figures, row.get("commit", "")[:9]]


def write(rows: list[dict[str, Any]], repeats: int) -> None:
    where = machine()
    now = [{**row, "name": " ".join(row[key] for key in ("model", "case", "side"))} for row in rows]
    rows = [*newest("packing", "rows", "name", [{**row, "commit": where["commit"]} for row in now]).values()]
    versions = ", ".join(f"{name} {where['versions'][name]}" for name in ("torch", "verl", "transformers"))
    text = [
        "Two ranks, experts over both, float32, activation checkpointing, one thread per rank; updates of verl's",
        f"worker, sides in turns in the same processes, medians of {repeats}, speedups within a turn. Tokens are",
        "those of the sequences, without padding. Linear attention has no kernel that takes lengths here: its module",
        "is called once for each sequence.",
        "",
        f"Bounds: {', '.join(f'{least} x with {case}' for case, least in LEAST.items())}, or where an update without",
        f"attention is not that fast, {OF_THE_MOST} of its speedup; {LEAST_OVER_PADDED} x a padded batch; a call for",
        f"each sequence at most {MOST_OVER_ONE_CALL} x of one call for the row.",
    ]
    result = {"machine": where, "models": {"softmax": MODEL, "linear": LINEAR}, "repeats": repeats, "rows": rows}
    on = f"{where['cpu']}, {where['cores']} cores; {versions}"
    write_table("packing", result, "Packed rows", "make bench-packing", on, text, COLUMNS, [*map(cells, rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="write the result file")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="whose cases are run")
    asked = parser.parse_args()
    rows = run(asked.repeats, models=asked.models)
    shown = Table(*COLUMNS)
    for row in rows:
        shown.add_row(*cells(row))
    Console(width=120).print(shown)
    if asked.keep:
        write(rows, asked.repeats)
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
