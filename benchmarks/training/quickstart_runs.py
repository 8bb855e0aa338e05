"""Runs of the quickstart that differ in settings, from one warm-up of each seed, and what their metrics say."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

__all__ = ["DIFFERENCE", "Metrics", "compare", "summary"]

DIFFERENCE = "training/rollout_probs_diff"
"""verl's name of the difference between a sampled token's probability in the trainer and in the rollout."""

Metrics = list[dict[str, Any]]
"""Of each step what verl logs."""


def compare(
    settings: Mapping[str, Sequence[str]], seeds: Sequence[int], steps: int, quickstart: Sequence[str]
) -> list[tuple[str, int, Metrics]]:
    """Run the quickstart once for each kind and seed; return kind, seed and metrics of each run.

    Args:
        settings: by kind of run, the overrides of verl's config; the first kind makes the warm-up for all.
        quickstart: the command, as arguments of Python.

    Raises:
        RuntimeError: a run has not made its steps.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            warm: Path | None = None
            for kind, overrides in settings.items():
                output = Path(folder) / f"{kind.replace(' ', '-')}-{seed}"
                options = ["--output", str(output), "--seed", str(seed), "--steps", str(steps)]
                options += ["--model", str(warm)] if warm else []
                options += [f"--override={one}" for one in overrides]
                found.append((kind, seed, _run([*quickstart, *options], output, kind, steps)))
                warm = warm or next((output / "warmup").rglob("config.json")).parent
                print(kind, seed, summary(found[-1][2]), flush=True)
    return found


def _run(arguments: Sequence[str], output: Path, kind: str, steps: int) -> Metrics:
    # Its exit status also says whether the difference is what float32 has.
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    path = output / "metrics.jsonl"
    metrics = [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []
    metrics = [step for step in metrics if f"{DIFFERENCE}_mean" in step]
    if len(metrics) < steps:
        raise RuntimeError(f"{kind} made {len(metrics)} of {steps} steps:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return metrics


def summary(metrics: Metrics) -> dict[str, Any]:
    """Return the mean and the largest difference of a run, and the reward of its first and its last two steps."""
    rewards = [step["critic/rewards/mean"] for step in metrics]
    return {
        "mean": mean(step[f"{DIFFERENCE}_mean"] for step in metrics),
        "largest": max(step[f"{DIFFERENCE}_max"] for step in metrics),
        "rewards": [mean(rewards[:2]), mean(rewards[-2:])],
    }
