"""Reads verl's metrics of each step, judges them, and prints a table."""

import json
import math
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["PHASES", "PROBS_DIFF", "REWARD", "SECONDS", "conclude", "print_summary", "read_records", "read_steps"]

# verl's names. The difference is the mean |p_trainer - p_vllm| of the sampled tokens.
REWARD, PROBS_DIFF = "critic/score/mean", "training/rollout_probs_diff_mean"
TOKENS, SECONDS = "perf/total_num_tokens", "timing_s/step"
PHASES = {
    "step": SECONDS,
    "generation": "timing_s/gen",
    "log-prob": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "weight sync": "timing_s/update_weights",
}
_RISE, _STANDARD_ERRORS, _LARGEST_PROBS_DIFF = 0.1, 3.0, 5e-3


def read_records(path: Path) -> list[dict]:
    """Return the complete lines of verl's file logger, which may still be writing; none if there is no file yet."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return number (``step``) and figures of each training step. A missing figure is NaN, which fails the verdict."""
    missing, steps = dict.fromkeys((REWARD, PROBS_DIFF, TOKENS, *PHASES.values()), math.nan), []
    for record in read_records(path):
        figures = {name: value for name, value in record["data"].items() if value is not None}
        if REWARD in record["data"]:
            steps.append({**missing, **figures, "step": record["step"]})
    return steps


def conclude(steps: list[dict[str, Any]], expected: int, samples_per_step: int) -> dict:
    """Return the figures of ``summary.json``, with ``passed`` and the ``failures`` in words.

    The mean reward of the last tenth of the steps (at least two) has to exceed the first tenth's by 0.1 and three
    standard errors. The error is the scatter between a window's steps. As two steps may agree by chance, it is at
    least the scatter of as many independent 0/1 rewards. Seconds per step leave out the first, which warms up.
    """
    failures = [f"only {len(steps)} of {expected} steps ran"] if len(steps) < max(expected, 2) else []
    if len(steps) < 2:
        return {"steps": len(steps), "passed": False, "failures": failures}
    window = max(round(len(steps) / 10), 2)
    parts = [[step[REWARD] for step in part] for part in (steps[:window], steps[-window:])]
    first, last = means = [fmean(part) for part in parts]
    by_chance = [mean * (1 - mean) / samples_per_step for mean in means]
    error = math.sqrt(sum(max(variance(p), chance) / window for p, chance in zip(parts, by_chance, strict=True)))
    if not (last - first >= _RISE and last - first > _STANDARD_ERRORS * error):
        failures.append(
            f"the reward did not clearly rise: {first:.3f} in the first {window} steps, {last:.3f} in the last "
            f"{window}; wanted at least +{_RISE} and more than {_STANDARD_ERRORS:.0f} standard errors "
            f"({_STANDARD_ERRORS * error:.3f})"
        )
    if bad := next((step for step in steps if not step[PROBS_DIFF] <= _LARGEST_PROBS_DIFF), None):
        failures.append(
            f"vLLM and the trainer disagree: {PROBS_DIFF} was {bad[PROBS_DIFF]:.2g} at step {bad['step']}, wanted at "
            f"most {_LARGEST_PROBS_DIFF} at every step; vLLM does not have the trainer's weights"
        )
    diffs = [step[PROBS_DIFF] for step in steps]
    return {
        "steps": len(steps),
        "passed": not failures,
        "failures": failures,
        "first_reward": first,
        "last_reward": last,
        "window_steps": window,
        "standard_error": error,
        "worst_probs_diff": math.nan if any(map(math.isnan, diffs)) else max(diffs),
        "tokens_per_second": sum(step[TOKENS] for step in steps) / sum(step[SECONDS] for step in steps),
        "seconds_per_step": {name: fmean(step[key] for step in steps[1:]) for name, key in PHASES.items()},
    }


def print_summary(console: Console, facts: dict) -> None:
    """Print the figures of ``conclude`` as a table."""
    table = Table("", "", title="quickstart", show_header=False)
    table.columns[0].style, table.columns[1].justify = "bold", "right"
    window = facts["window_steps"]
    rows = {
        f"reward, first {window} steps": f"{facts['first_reward']:.3f}",
        f"reward, last {window} steps": f"{facts['last_reward']:.3f} (± {facts['standard_error']:.3f})",
        "largest train/rollout difference": f"{facts['worst_probs_diff']:.1e}",
        "tokens per second": f"{facts['tokens_per_second']:.0f}",
    }
    for name, seconds in facts["seconds_per_step"].items():
        rows["seconds per step" if name == "step" else f"  {name}"] = f"{seconds:.2f}"
    for row in rows.items():
        table.add_row(*row)
    console.print(table)
