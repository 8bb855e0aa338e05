"""Whole tensors beside slices of a model with the names of Qwen3-30B-A3B, whose tensors are many and few bytes.

    python -m benchmarks.weights.weight_sync --rollout vllm-names [--repeats 5]

Trainer ranks of this engine send float32 masters in bfloat16 into vLLM's CPU build, as whole tensors and as each
worker's parameters, in turns. ``sync_megabytes`` is smaller than a stack of experts, as 2,048 is for Qwen3-30B-A3B, so
experts are sent one by one. Two ranks feed a replica each, or one for both. In a group of 16 with
``ep_size=8``, two ranks feed one replica, and the others drop their bytes. Python bounds both sides,
so ``auto`` is right if ``sliced`` is no slower.
"""

import json
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.tables import RESULTS, report
from benchmarks.weights.into_vllm import seconds_of_syncs, send_together
from benchmarks.weights.weight_sync_sglang import NAMES
from epfsdp2.rollout.layout.specs import Rollout

__all__ = ["holds", "main"]

SIDES = ("full", "sliced")
MEGABYTES = 4
PLACES = ((2, 1, 2), (2, 2, 2), (16, 2, 8))  # trainer ranks, the rollout's TP, the trainer's ep
COLUMNS = ["trainer ranks", "rollout", "side", "tensors", "MB", "end to end s", "against full"]


def _ranks(tp: int, handles: list[str], folder: Path, ep: int, turns: list[str], out: Path) -> None:
    """Send the weights of each turn; write when each began, and what was handed over."""
    from benchmarks.weights.weight_sync import BUCKET_MEGABYTES, ours

    sync = ours(folder, torch.float32, ep, MEGABYTES)
    began, sent = [], {}
    for side in turns:
        weights = sync.weights().for_worker(side, Rollout(tp)).tensors()
        at, stats = send_together(weights, handles, BUCKET_MEGABYTES)
        began.append(at)
        sent[side] = stats and (stats.tensors, stats.nbytes)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"began": began, "sent": sent}))


def _run(world: int, tp: int, ep: int, repeats: int) -> list[dict]:
    """Medians of both sides with so many trainer ranks; the first sync of each warms up."""
    turns = [side for _ in range(repeats + 1) for side in SIDES]
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "model", Path(name) / "figures.json"
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**NAMES, mlp_only_layers=[])).float().save_pretrained(folder)
        syncs: list[dict] = [{} for _ in turns]
        replicas = 1 if world > 2 else None
        figures, took = seconds_of_syncs(
            folder, tp, syncs, _ranks, folder, ep, turns, out=out, world=world, replicas=replicas
        )
    rows: list[dict] = []
    for side in SIDES:
        seconds = statistics.median([took[i] for i, turn in enumerate(turns) if turn == side][1:])
        tensors, nbytes = figures["sent"][side]
        row = {"ranks": world, "tp": tp, "side": side, "tensors": tensors, "bytes": nbytes, "seconds": seconds}
        rows.append(row | {"times_full": (rows or [row])[0]["seconds"] / seconds})
    return rows


def _cells(row: dict) -> list[str]:
    return [
        str(row["ranks"]),
        f"TP {row['tp']}",
        row["side"],
        f"{row['tensors']:,}",
        f"{row['bytes'] / 1e6:.0f}",
        f"{row['seconds']:.2f}",
        f"{row['times_full']:.1f} x",
    ]


def holds(row: dict) -> bool:
    """Whether a row keeps what ``auto`` relies on."""
    return row["times_full"] >= 1


def _text(repeats: int) -> list[str]:
    return [
        "A model with the names of Qwen3-30B-A3B (48 layers of 128 experts, 18,867 tensors in a checkpoint) and tiny",
        f"widths. {MEGABYTES} MB of buffers are to its layers what 2,048 are to those of the real one. Full: whole",
        "tensors; sliced: each worker's parameters. Sides take turns,",
        f"medians of {repeats}. Tensors and MB are those handed to one worker. Of 16 trainer ranks the first",
        "two feed a replica, and the others drop what their workers would get; all share these cores.",
        "",
        "Bound: `sliced`, which `auto` takes, is no slower than `full`.",
    ]


def main(repeats: int, sizes: list[int]) -> int:
    """Measure, print and write the figures.

    Args:
        sizes: vLLM's tensor-parallel sizes.
    """
    rows = []
    for place in PLACES:
        if place[1] in sizes:
            rows += _run(*place, repeats)
            print("\n".join(" | ".join(_cells(row)) for row in rows[-len(SIDES) :]), flush=True)
    command, folder = "make bench-sync ARGS='--rollout vllm-names'", RESULTS if len(sizes) == 2 else None
    lines, text = [*map(_cells, rows)], _text(repeats)
    report(
        "weight_sync_names",
        "A weight sync of many small tensors",
        command,
        ("torch",),
        text,
        COLUMNS,
        lines,
        folder=folder,
    )
    return 0 if all(map(holds, rows)) else 1
