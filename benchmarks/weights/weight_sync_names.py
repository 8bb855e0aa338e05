"""Whole tensors beside slices of a model with the names of Qwen3-30B-A3B, whose tensors are many and few bytes.

    python -m benchmarks.weights.weight_sync --rollout vllm-names [--repeats 5]

Trainer ranks of this engine send float32 masters in bfloat16 into vLLM's CPU build, as whole tensors and as each
worker's parameters, in turns. ``sync_megabytes`` is smaller than a stack of experts, as 2,048 is for Qwen3-30B-A3B, so
experts are sent one by one. Two ranks feed a replica each, or one for both. In a group of 16 with
``ep_size=8``, two ranks feed one replica, and the others drop their bytes. Python bounds both sides,
so ``auto`` is right if ``sliced`` is no slower.
"""

from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measure import median_ratio, random_checkpoint, turns_of
from benchmarks.tables import judged, report
from benchmarks.weights.into_vllm import seconds_of_syncs, send_together
from benchmarks.weights.weight_sync_sglang import NAMES
from epfsdp2.rollout.layout.specs import Rollout

__all__ = ["main"]

SIDES = ("full", "sliced")
MEGABYTES = 4
PLACES = ((2, 1, 2), (2, 2, 2), (16, 2, 8))  # trainer ranks, the rollout's TP, the trainer's ep


def _ranks(handles: list[str], folder: Path, tp: int, ep: int, turns: list[str]) -> dict[str, Any]:
    """Send the weights of each turn; returns when each began, and tensors and bytes of a worker by side."""
    from benchmarks.weights.weight_sync import BUCKET_MEGABYTES, ours

    sync = ours(folder, torch.float32, ep, MEGABYTES)
    began, sent = [], {}
    for side in turns:
        weights = sync.weights().for_worker(side, Rollout(tp)).tensors()
        at, stats = send_together(weights, handles, BUCKET_MEGABYTES)
        began.append(at)
        sent[side] = stats and (stats.tensors, stats.nbytes)
    return {"began": began, "sent": sent}


def _run(world: int, tp: int, ep: int, repeats: int) -> list[dict[str, str]]:
    """Return a row for each side with so many trainer ranks."""
    turns = [side for turn in turns_of(SIDES, repeats) for side in turn]
    with random_checkpoint("qwen3_moe", NAMES) as folder:
        figures, took = seconds_of_syncs(folder, tp, turns, _ranks, folder, tp, ep, world=world)
    rows = []
    for side in SIDES:
        faster, (tensors, nbytes) = median_ratio(took["full"], took[side]), figures["sent"][side]
        rows.append(
            {
                "trainer ranks": str(world),
                "rollout": f"TP {tp}",
                "side": side,
                "tensors": f"{tensors:,}",
                "MB": f"{nbytes / 1e6:.0f}",
                "end to end s": f"{median(took[side]):.2f}",
                "against full": f"{faster:.1f} x",
                **judged(faster >= 1 if side == "sliced" else None),
            }
        )
    return rows


def main(repeats: int, sizes: list[int], folder: Path | None) -> int:
    """Measure at tensor-parallel sizes of vLLM, and report to a folder (None to print only)."""
    rows = [row for place in PLACES if place[1] in sizes for row in _run(*place, repeats)]
    text = [
        "A model with the names of Qwen3-30B-A3B (48 layers of 128 experts, 18,867 tensors in a checkpoint) and tiny",
        f"widths. {MEGABYTES} MB of buffers are to its layers what 2,048 are to those of the real one. Full: whole",
        "tensors; sliced: each worker's parameters. Sides take turns,",
        f"medians of {repeats}. Tensors and MB: sent to one worker. Of 16 trainer ranks the first",
        "two feed a replica, and the others drop their bytes; all share these cores.",
        "",
        "Bound: `sliced`, which `auto` takes, is no slower than `full`.",
    ]
    command = "make bench-sync ARGS='--rollout vllm-names'"
    heading, packages = "A weight sync of many small tensors", ("torch",)
    return report("weight_sync_names", heading, command, packages, text, rows, folder=folder)
