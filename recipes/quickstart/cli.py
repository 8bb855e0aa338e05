"""The quickstart's command line: make a model and data, warm up, train with GRPO, say what came of it."""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from . import task
from .commands import RANKS, grpo_command, overrides, pretty, sglang_environment, warmup_command
from .failure import cause
from .metrics import Step, conclude, print_summary, read_records, read_steps, write_plot
from .processes import Interrupted, ProcessTree

__all__ = ["main", "parse"]

_HERE = Path(__file__).resolve().parent
_OUTPUT_HELP = "folder for everything written; where it has an earlier run, that one is kept and a number is added"


class PhaseFailed(Exception):
    """A phase ended with a non-zero status; the text says which and why."""


def _free_folder(wanted: Path) -> Path:
    """Return ``wanted``, or the first of ``wanted-2``, ``wanted-3``, ... that is not there or empty."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(
        p for p in itertools.chain([wanted], numbered) if not p.exists() or (p.is_dir() and not any(p.iterdir()))
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.quickstart",
        description="GRPO on a small Mixture-of-Experts with engine=epfsdp2, offline, on a machine without a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("runs/quickstart"), help=_OUTPUT_HELP)
    add("--seed", type=int, default=1, help="of the weights, the data and the sampling")
    add("--steps", type=int, default=12, help="GRPO steps")
    add("--batch-size", type=int, default=16, help="questions per step")
    add("--group-size", type=int, default=8, help="answers sampled per question")
    add("--lr", type=float, default=5e-4, help="learning rate of GRPO")
    add("--warmup-steps", type=int, default=80, help="supervised steps before GRPO")
    add("--warmup-batch-size", type=int, default=64, help="conversations per supervised step")
    add("--warmup-lr", type=float, default=2e-3, help="learning rate of the warm-up")
    add("--right-share", type=float, default=0.6, help="share of the warm-up's labels that are right")
    add("--model", type=Path, help="start GRPO from this checkpoint of an earlier warm-up")
    add(
        "--rollout", choices=("vllm", "sglang"), default="vllm", help="what generates (SGLang: make setup STACK=sglang)"
    )
    add("--override", action="append", default=[], metavar="KEY=VALUE", help="one more Hydra override for GRPO")
    add("--dry-run", action="store_true", help="print the commands, write nothing")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch_size", "group_size", "warmup_steps", "warmup_batch_size"):
        option, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if value < 2:
            parser.error(f"{option} is {value}; it has to be at least 2")
        if name.endswith("batch_size") and value % RANKS:
            parser.error(f"{option} is {value}; two ranks share it, so it has to be even")
    if options.batch_size > len(task.problems()):
        parser.error(f"--batch-size is {options.batch_size}; there are {len(task.problems())} questions")
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: no config.json there")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the quickstart; return 0 where the reward clearly rose and vLLM agreed with the trainer at every step."""
    options = parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        with ProcessTree() as tree:
            return _Quickstart(options, console, tree).run()
    except Interrupted as interrupted:
        console.print(f"[yellow]interrupted by {interrupted}; every process of this run has ended[/]")
        return 128 + interrupted.number
    except PhaseFailed as failed:
        console.print(str(failed), style="red", markup=False)
        return 1


class _Quickstart:
    """One run: its folder, its options, and its phases in order."""

    def __init__(self, options: argparse.Namespace, console: Console, tree: ProcessTree):
        self.options, self.console, self.tree = options, console, tree
        self.output = _free_folder(options.output.resolve())
        self.metrics = self.output / "metrics.jsonl"
        self.warmed_up = self.output / "warmup" / f"global_step_{options.warmup_steps}" / "huggingface"
        self.seconds: dict[str, float] = {}
        self.env = tree.environment()
        if options.rollout == "sglang":
            # SGLang leaves its sockets in the folder for temporary files.
            self.env |= sglang_environment() | {"TMPDIR": str(tree.folder)}

    def run(self) -> int:
        started, options = time.monotonic(), self.options
        warmup = warmup_command(self._values(self.output / "model"))
        grpo = grpo_command(
            self._values(options.model.resolve() if options.model else self.warmed_up),
            [*([] if options.rollout == "vllm" else overrides(options.rollout, {})), *options.override],
        )
        if options.dry_run:
            if options.model is None:
                self._show("warm-up", warmup)
            self._show("GRPO", grpo)
            return 0
        self._make_inputs()
        if options.model is None:
            self._warm_up(warmup)
        self._train(grpo)
        self.seconds["total"] = time.monotonic() - started
        return self._conclude(read_steps(self.metrics))

    def _values(self, model: Path) -> dict:
        """Return what ``$names`` in the override files stand for, for a run that starts from ``model``."""
        return vars(self.options) | {
            "output": self.output,
            "model": model,
            "warmup_data": self.output / "data/warmup.parquet",
            "warmup_batch_of_a_rank": self.options.warmup_batch_size // RANKS,
            "grpo_data": self.output / "data/grpo.parquet",
            "reward_file": _HERE / "task.py",
            "sampler_file": _HERE / "sampler.py",
            "ray_dir": self.tree.folder,
        }

    def _make_inputs(self) -> None:
        options = self.options
        self.output.mkdir(parents=True, exist_ok=True)
        if self.output != options.output.resolve():
            self.console.print(f"{options.output} has an earlier run, which is kept")
        copies = -(-options.warmup_steps * options.warmup_batch_size // len(task.problems()))
        task.write_datasets(self.output / "data", options.seed, copies, options.right_share)
        if options.model is None:
            with self.console.status("making a model, a tokenizer and data"):
                # Late, because transformers takes seconds to import and --help needs none of it.
                from transformers.utils import logging

                from .model import write_model

                logging.disable_progress_bar()
                write_model(self.output / "model", options.seed)
        self.console.print(f"model and data in {self.output}")

    def _warm_up(self, command: list[str]) -> None:
        file, steps = self.output / "warmup.jsonl", self.options.warmup_steps

        with self.console.status("warm-up: starting") as status:

            def tick() -> None:
                if done := len(read_records(file)):
                    status.update(f"warm-up: step {done}/{steps}")

            self._phase("warm-up", command, file, tick)
        if not (self.warmed_up / "config.json").is_file():
            raise PhaseFailed(f"the warm-up ended without a checkpoint in {self.warmed_up}")
        seconds = self.seconds["warm-up"]
        self.console.print(f"warm-up: {steps} supervised steps in {seconds:.0f} s -> {self.warmed_up}")

    def _train(self, command: list[str]) -> None:
        self._show("GRPO", command)
        shown = 0

        with self.console.status(
            f"GRPO: starting Ray, two trainer ranks and {self.options.rollout} (a minute)"
        ) as status:

            def tick() -> None:
                nonlocal shown
                for step in read_steps(self.metrics)[shown:]:
                    self.console.print(
                        f"step {step.number:3d}/{self.options.steps}  reward {step.reward:.3f}  "
                        f"train/rollout difference {step.probs_diff:.1e}  {step.seconds:.1f} s"
                    )
                    shown += 1
                    status.update("GRPO")

            self._phase("GRPO", command, self.metrics, tick)

    def _phase(self, name: str, command: list[str], metrics: Path, tick: Callable[[], None]) -> None:
        started = time.monotonic()
        log = self.output / "logs" / f"{name.lower()}.log"
        status = self.tree.run(command, self.env | {"VERL_FILE_LOGGER_PATH": str(metrics)}, log, tick)
        if status != 0:
            lines = "\n  ".join(cause(log))
            raise PhaseFailed(f"{name} ended with status {status}. The cause, from {log}:\n  {lines}")
        self.seconds[name] = time.monotonic() - started

    def _show(self, name: str, command: list[str]) -> None:
        self.console.print(f"\n{name}:")
        self.console.print(pretty(command), markup=False, style="dim")
        self.console.print()

    def _conclude(self, steps: list[Step]) -> int:
        options = self.options
        facts = conclude(steps, options.steps, options.batch_size * options.group_size)
        if len(steps) > 1:
            print_summary(self.console, facts)
        (self.output / "summary.json").write_text(json.dumps(facts | {"seconds": self.seconds}, indent=2) + "\n")
        self.console.print(f"metrics: {self.metrics}")
        if steps and write_plot(steps, self.output / "quickstart.png"):
            self.console.print(f"plot: {self.output / 'quickstart.png'}")
        elif steps:
            self.console.print("no plot: matplotlib is not installed (pip install matplotlib draws it next time)")
        if facts["passed"]:
            self.console.print(f"[green]the reward rose[/] ({self.seconds['total']:.0f} s in all)")
        for failure in facts["failures"]:
            self.console.print(f"FAILED: {failure}", style="red", markup=False)
        return 0 if facts["passed"] else 1
