"""What verl wrote per step, and what the quickstart concludes from it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance

__all__ = ["PHASES", "Step", "StepReader", "Verdict", "judge", "seconds_per_step", "summary", "tokens_per_second"]

PHASES = {
    "generation": "timing_s/gen",
    "log-prob": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "weight sync": "timing_s/update_weights",
}
REWARD = "critic/score/mean"
PROBS_DIFF = "training/rollout_probs_diff_mean"

CLEARLY = 0.1
STANDARD_ERRORS = 3.0
LARGEST_PROBS_DIFF = 5e-3


@dataclass(frozen=True)
class Step:
    """One training step: mean reward, mean |p_trainer - p_vllm| of the sampled tokens, tokens, seconds."""

    number: int
    reward: float
    probs_diff: float
    tokens: float
    seconds: float
    phases: dict[str, float]

    @classmethod
    def from_line(cls, line: str) -> "Step | None":
        """One line of verl's file logger; None for a line that is not a training step's (a validation's)."""
        record = json.loads(line)
        data = record["data"]
        if REWARD not in data:
            return None
        return cls(
            number=record["step"],
            reward=data[REWARD],
            # A missing or null figure counts as not a number, and so as a failure, never as agreement.
            probs_diff=_figure(data, PROBS_DIFF),
            tokens=_figure(data, "perf/total_num_tokens"),
            seconds=_figure(data, "timing_s/step"),
            phases={name: _figure(data, key) for name, key in PHASES.items()},
        )


def _figure(data: dict, key: str) -> float:
    value = data.get(key)
    return math.nan if value is None else float(value)


class StepReader:
    """Reads steps from a file that verl is still writing."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0
        self.steps: list[Step] = []

    def new_steps(self) -> list[Step]:
        """Steps whose lines were completed since the last call; they are added to ``steps``."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        found = [step for line in complete.decode().splitlines() if (step := Step.from_line(line))]
        self.steps += found
        return found


@dataclass(frozen=True)
class Verdict:
    """Whether the run shows what it should; ``failures`` says in words what it does not."""

    first: float
    last: float
    window: int
    standard_error: float
    worst_probs_diff: float
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def judge(steps: list[Step], expected: int, samples_per_step: int) -> Verdict:
    """Compare the mean reward of the first and the last tenth of the steps (at least two steps each).

    The reward is clearly up when the difference is at least 0.1 and more than three of its standard errors. That
    error is the larger of two estimates: the scatter of the step means inside both windows, and what the same number
    of independent 0/1 rewards would scatter by. The first sees questions of unequal difficulty, the second does not
    collapse when two neighbouring steps happen to agree.
    """
    if len(steps) < 2:
        return Verdict(math.nan, math.nan, 0, math.nan, math.nan, (f"only {len(steps)} of {expected} steps ran",))
    window = min(max(round(len(steps) / 10), 2), len(steps))
    first, last = [[s.reward for s in part] for part in (steps[:window], steps[-window:])]
    mean_first, mean_last = fmean(first), fmean(last)
    error = math.sqrt(sum(_variance_of_mean(part, samples_per_step) for part in (first, last)))
    diffs = [s.probs_diff for s in steps]
    worst = math.nan if any(map(math.isnan, diffs)) else max(diffs)

    failures = []
    if len(steps) < expected:
        failures.append(f"only {len(steps)} of {expected} steps ran")
    rise = mean_last - mean_first
    if not (rise >= CLEARLY and rise > STANDARD_ERRORS * error):
        failures.append(
            f"the reward did not clearly rise: {mean_first:.3f} in the first {window} steps, {mean_last:.3f} in the "
            f"last {window}; wanted at least +{CLEARLY} and more than {STANDARD_ERRORS:.0f} standard errors "
            f"({STANDARD_ERRORS * error:.3f})"
        )
    if not worst <= LARGEST_PROBS_DIFF:
        bad = next(s for s in steps if not s.probs_diff <= LARGEST_PROBS_DIFF)
        failures.append(
            f"vLLM and the trainer disagree: {PROBS_DIFF} was {bad.probs_diff:.2g} at step {bad.number}, wanted at "
            f"most {LARGEST_PROBS_DIFF} at every step; vLLM does not have the trainer's weights"
        )
    return Verdict(mean_first, mean_last, window, error, worst, tuple(failures))


def _variance_of_mean(rewards: list[float], samples_per_step: int) -> float:
    mean = fmean(rewards)
    observed = variance(rewards) if len(rewards) > 1 else 0.0
    return max(observed, mean * (1 - mean) / samples_per_step) / len(rewards)


def tokens_per_second(steps: list[Step]) -> float:
    """Prompt and response tokens of all ranks, over the whole step's seconds."""
    return sum(s.tokens for s in steps) / sum(s.seconds for s in steps)


def seconds_per_step(steps: list[Step]) -> dict[str, float]:
    """Mean seconds of a step and of its phases, without the first step, which also warms up."""
    settled = steps[1:] or steps
    phases = {name: fmean(s.phases[name] for s in settled) for name in PHASES}
    return {"step": fmean(s.seconds for s in settled), **phases}


def summary(steps: list[Step], verdict: Verdict) -> dict:
    """The run in figures, for ``summary.json``."""
    facts = {"steps": len(steps), "passed": verdict.passed, "failures": list(verdict.failures)}
    if not steps:
        return facts
    return facts | {
        "first_reward": verdict.first,
        "last_reward": verdict.last,
        "window_steps": verdict.window,
        "standard_error": verdict.standard_error,
        "worst_probs_diff": verdict.worst_probs_diff,
        "tokens_per_second": tokens_per_second(steps),
        "seconds_per_step": seconds_per_step(steps),
    }
