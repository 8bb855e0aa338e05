"""The quickstart's plot and its closing table."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from .metrics import LARGEST_PROBS_DIFF, PHASES, Step, Verdict, seconds_per_step, tokens_per_second

__all__ = ["print_summary", "write_plot"]


def write_plot(steps: list[Step], path: Path) -> bool:
    """Reward, train/rollout difference and seconds per phase over the steps, as one PNG; False without matplotlib."""
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


def print_summary(console: Console, steps: list[Step], verdict: Verdict) -> None:
    """Rewards, agreement, speed and seconds per phase. Seconds leave out the first step."""
    table = Table(title="quickstart", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row(f"reward, first {verdict.window} steps", f"{verdict.first:.3f}")
    table.add_row(f"reward, last {verdict.window} steps", f"{verdict.last:.3f} (± {verdict.standard_error:.3f})")
    table.add_row("largest train/rollout difference", f"{verdict.worst_probs_diff:.1e}")
    table.add_row("tokens per second", f"{tokens_per_second(steps):.0f}")
    seconds = seconds_per_step(steps)
    table.add_row("seconds per step", f"{seconds['step']:.2f}")
    for name in PHASES:
        table.add_row(f"  {name}", f"{seconds[name]:.2f}")
    console.print(table)
