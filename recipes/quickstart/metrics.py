"""Reads what verl wrote per step, judges it, and shows it as a table and a plot."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance

from rich.console import Console
from rich.table import Table

__all__ = ["PHASES", "Step", "conclude", "print_summary", "read_records", "read_steps", "write_plot"]

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


def read_records(path: Path) -> list[dict]:
    """Return the complete lines of verl's file logger, which may still be writing; none if there is no file yet."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def read_steps(path: Path) -> list[Step]:
    """Return the training steps among the ``read_records``, without validations."""
    return [_step(record["step"], record["data"]) for record in read_records(path) if REWARD in record["data"]]


def _step(number: int, data: dict) -> Step:
    def figure(key: str) -> float:
        # A missing or null figure counts as not a number, and so as a failure, never as agreement.
        return math.nan if data.get(key) is None else float(data[key])

    phases = {name: figure(key) for name, key in PHASES.items()}
    tokens, seconds = figure("perf/total_num_tokens"), figure("timing_s/step")
    return Step(number, figure(REWARD), figure(PROBS_DIFF), tokens, seconds, phases)


def conclude(steps: list[Step], expected: int, samples_per_step: int) -> dict:
    """Return the run in figures for ``summary.json``, with ``passed`` and, in words, the ``failures``.

    The mean reward of the last tenth of the steps is compared with that of the first (at least two steps each). It is
    clearly up when the difference is at least 0.1 and more than three of its standard errors. That error is the larger
    of two estimates: the scatter of the step means inside both windows, and what the same number of independent 0/1
    rewards would scatter by. The first sees questions of unequal difficulty, the second does not collapse when two
    neighbouring steps happen to agree. Seconds per step leave out the first, which also warms up.
    """
    failures = [f"only {len(steps)} of {expected} steps ran"] if len(steps) < max(expected, 2) else []
    if len(steps) < 2:
        return {"steps": len(steps), "passed": False, "failures": failures}
    window = max(round(len(steps) / 10), 2)
    parts = [[step.reward for step in part] for part in (steps[:window], steps[-window:])]
    first, last = map(fmean, parts)
    error = math.sqrt(sum(_variance_of_mean(part, samples_per_step) for part in parts))
    if not (last - first >= CLEARLY and last - first > STANDARD_ERRORS * error):
        failures.append(
            f"the reward did not clearly rise: {first:.3f} in the first {window} steps, {last:.3f} in the last "
            f"{window}; wanted at least +{CLEARLY} and more than {STANDARD_ERRORS:.0f} standard errors "
            f"({STANDARD_ERRORS * error:.3f})"
        )
    if bad := next((step for step in steps if not step.probs_diff <= LARGEST_PROBS_DIFF), None):
        failures.append(
            f"vLLM and the trainer disagree: {PROBS_DIFF} was {bad.probs_diff:.2g} at step {bad.number}, wanted at "
            f"most {LARGEST_PROBS_DIFF} at every step; vLLM does not have the trainer's weights"
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


def _variance_of_mean(rewards: list[float], samples_per_step: int) -> float:
    mean = fmean(rewards)
    return max(variance(rewards), mean * (1 - mean) / samples_per_step) / len(rewards)


def print_summary(console: Console, facts: dict) -> None:
    """Print rewards, agreement, speed and seconds per phase, as ``conclude`` returned them."""
    table = Table("", "", title="quickstart", show_header=False)
    table.columns[0].style, table.columns[1].justify = "bold", "right"
    table.add_row(f"reward, first {facts['window_steps']} steps", f"{facts['first_reward']:.3f}")
    last = f"{facts['last_reward']:.3f} (± {facts['standard_error']:.3f})"
    table.add_row(f"reward, last {facts['window_steps']} steps", last)
    table.add_row("largest train/rollout difference", f"{facts['worst_probs_diff']:.1e}")
    table.add_row("tokens per second", f"{facts['tokens_per_second']:.0f}")
    for name, seconds in facts["seconds_per_step"].items():
        table.add_row("seconds per step" if name == "step" else f"  {name}", f"{seconds:.2f}")
    console.print(table)


def write_plot(steps: list[Step], path: Path) -> bool:
    """Plot reward, train/rollout difference and seconds per phase over the steps; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    numbers = [s.number for s in steps]
    figure, (reward, diff, seconds) = plt.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    reward.plot(numbers, [s.reward for s in steps], marker=".")
    reward.set(ylabel="mean reward", ylim=(-0.02, 1.02), title="GRPO with engine=epfsdp2, ep_size=2")
    # Exact agreement is 0, which a logarithmic axis can't show.
    diff.semilogy(numbers, [max(s.probs_diff, 1e-12) for s in steps], marker=".", label="mean difference")
    diff.axhline(LARGEST_PROBS_DIFF, color="tab:red", linestyle="--", label=f"limit {LARGEST_PROBS_DIFF}")
    diff.set(ylabel="|p trainer - p vLLM|")
    diff.legend()
    seconds.stackplot(numbers, [[s.phases[name] for s in steps] for name in PHASES], labels=list(PHASES))
    seconds.set(xlabel="step", ylabel="seconds")
    seconds.legend(loc="upper right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
