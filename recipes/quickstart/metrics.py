"""Reads verl's metrics of each step, judges them, and prints a table."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance

from rich.console import Console
from rich.table import Table

__all__ = ["PHASES", "Step", "conclude", "print_summary", "read_records", "read_steps"]

PHASES = {
    "generation": "timing_s/gen",
    "log-prob": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "weight sync": "timing_s/update_weights",
}
REWARD = "critic/score/mean"
PROBS_DIFF = "training/rollout_probs_diff_mean"
_RISE, _STANDARD_ERRORS, _LARGEST_PROBS_DIFF = 0.1, 3.0, 5e-3


@dataclass(frozen=True)
class Step:
    """One training step; ``probs_diff`` is the mean |p_trainer - p_vllm| of the sampled tokens."""

    number: int
    reward: float
    probs_diff: float
    tokens: float
    seconds: float
    phases: dict[str, float]


def read_records(path: Path) -> list[dict]:
    """Return the complete lines of verl's file logger, which may still be writing; none if there is no file yet."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def read_steps(path: Path) -> list[Step]:
    """Return the training steps, without validations. A missing figure is NaN, which fails the verdict."""
    steps = []
    for record in read_records(path):
        figures = {key: math.nan if value is None else value for key, value in record["data"].items()}
        phases = {name: figures.get(key, math.nan) for name, key in PHASES.items()}
        keys = (REWARD, PROBS_DIFF, "perf/total_num_tokens", "timing_s/step")
        reward, probs_diff, tokens, seconds = (figures.get(key, math.nan) for key in keys)
        if REWARD in figures:
            steps.append(Step(record["step"], reward, probs_diff, tokens, seconds, phases))
    return steps


def conclude(steps: list[Step], expected: int, samples_per_step: int) -> dict:
    """Return the figures of ``summary.json``, with ``passed`` and the ``failures`` in words.

    The mean reward of the last tenth of the steps (at least two) has to exceed the first tenth's by 0.1 and three
    standard errors. The error is the scatter between a window's steps. As two steps may agree by chance, it is at
    least the scatter of as many independent 0/1 rewards. Seconds per step leave out the first, which warms up.
    """
    failures = [f"only {len(steps)} of {expected} steps ran"] if len(steps) < max(expected, 2) else []
    if len(steps) < 2:
        return {"steps": len(steps), "passed": False, "failures": failures}
    window = max(round(len(steps) / 10), 2)
    parts = [[step.reward for step in part] for part in (steps[:window], steps[-window:])]
    first, last = means = [fmean(part) for part in parts]
    by_chance = [mean * (1 - mean) / samples_per_step for mean in means]
    error = math.sqrt(sum(max(variance(p), chance) / window for p, chance in zip(parts, by_chance, strict=True)))
    if not (last - first >= _RISE and last - first > _STANDARD_ERRORS * error):
        failures.append(
            f"the reward did not clearly rise: {first:.3f} in the first {window} steps, {last:.3f} in the last "
            f"{window}; wanted at least +{_RISE} and more than {_STANDARD_ERRORS:.0f} standard errors "
            f"({_STANDARD_ERRORS * error:.3f})"
        )
    if bad := next((step for step in steps if not step.probs_diff <= _LARGEST_PROBS_DIFF), None):
        failures.append(
            f"vLLM and the trainer disagree: {PROBS_DIFF} was {bad.probs_diff:.2g} at step {bad.number}, wanted at "
            f"most {_LARGEST_PROBS_DIFF} at every step; vLLM does not have the trainer's weights"
        )
    diffs = [step.probs_diff for step in steps]
    phases = {name: fmean(step.phases[name] for step in steps[1:]) for name in PHASES}
    return {
        "steps": len(steps),
        "passed": not failures,
        "failures": failures,
        "first_reward": first,
        "last_reward": last,
        "window_steps": window,
        "standard_error": error,
        "worst_probs_diff": math.nan if any(map(math.isnan, diffs)) else max(diffs),
        "tokens_per_second": sum(step.tokens for step in steps) / sum(step.seconds for step in steps),
        "seconds_per_step": {"step": fmean(step.seconds for step in steps[1:]), **phases},
    }


def print_summary(console: Console, facts: dict) -> None:
    """Print the figures of ``conclude`` as a table."""
    table = Table("", "", title="quickstart", show_header=False)
    table.columns[0].style, table.columns[1].justify = "bold", "right"
    window, last = facts["window_steps"], f"{facts['last_reward']:.3f} (± {facts['standard_error']:.3f})"
    table.add_row(f"reward, first {window} steps", f"{facts['first_reward']:.3f}")
    table.add_row(f"reward, last {window} steps", last)
    table.add_row("largest train/rollout difference", f"{facts['worst_probs_diff']:.1e}")
    table.add_row("tokens per second", f"{facts['tokens_per_second']:.0f}")
    for name, seconds in facts["seconds_per_step"].items():
        table.add_row("seconds per step" if name == "step" else f"  {name}", f"{seconds:.2f}")
    console.print(table)
