"""Reads verl's metrics of each step, and judges them."""

import json
import math
from pathlib import Path

import pandas as pd

__all__ = ["PROBS_DIFF", "REWARD", "SECONDS", "conclude", "read_records", "read_steps"]

# verl's names. The difference is the mean |p_trainer - p_vllm| of the sampled tokens.
REWARD, PROBS_DIFF, SECONDS = "critic/score/mean", "training/rollout_probs_diff_mean", "timing_s/step"
_RISE, _STANDARD_ERRORS, _LARGEST_PROBS_DIFF = 0.1, 3.0, 5e-3


def read_records(path: Path) -> list[dict]:
    """Return the complete lines of verl's file logger, which may still be writing; none if there is no file yet."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def read_steps(path: Path) -> pd.DataFrame:
    """Return number (``step``) and figures of each training step. A missing figure is NaN, which fails the verdict."""
    rows = [{**record["data"], "step": record["step"]} for record in read_records(path) if REWARD in record["data"]]
    return pd.DataFrame(rows, columns=["step", REWARD, PROBS_DIFF, SECONDS], dtype=float)


def conclude(steps: pd.DataFrame, expected: int, samples_per_step: int) -> dict:
    """Return the figures of ``summary.json``, with ``passed`` and the ``failures`` in words.

    The mean reward of the last tenth of the steps (at least two) has to exceed the first tenth's by 0.1 and three
    standard errors. Two steps may agree by chance, so the error is at least that of as many independent 0/1 rewards.
    """
    if len(steps) < expected:
        return {"passed": False, "failures": [f"only {len(steps)} of {expected} steps ran"]}
    window = max(round(len(steps) / 10), 2)
    rewards = steps[REWARD].to_numpy()
    parts = rewards[:window], rewards[-window:]
    first, last = (float(part.mean()) for part in parts)
    variances = [max(part.var(ddof=1), part.mean() * (1 - part.mean()) / samples_per_step) for part in parts]
    error, worst = math.sqrt(sum(variances) / window), steps[PROBS_DIFF].max(skipna=False)
    wanted, failures = max(_RISE, _STANDARD_ERRORS * error), []
    if not last - first >= wanted:
        means = f"{first:.3f} in the first {window} steps, {last:.3f} in the last {window}"
        failures.append(f"the reward did not clearly rise: {means}; wanted at least +{wanted:.3f}")
    if not worst <= _LARGEST_PROBS_DIFF:
        found = f"{PROBS_DIFF} was {worst:.2g}, wanted at most {_LARGEST_PROBS_DIFF} at every step"
        failures.append(f"vLLM does not have the trainer's weights: {found}")
    figures = {"first_reward": first, "last_reward": last, "standard_error": error, "worst_probs_diff": worst}
    return {"passed": not failures, "failures": failures, **figures}
