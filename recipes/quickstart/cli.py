"""The quickstart's command line: make a model and data, warm up, train with GRPO, say what came of it."""

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import torch
from rich.console import Console

from . import task
from .commands import RANKS, grpo_command, pretty, warmup_command
from .failure import cause
from .metrics import Step, StepReader, judge, summary
from .processes import Interrupted, ProcessTree
from .report import print_summary, write_plot

__all__ = ["main", "parse"]

# What verl's two trainers should find, whatever the shell has: one thread per process on a small machine, our own Ray.
_CHILD_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
_RAY_ENV = ("RAY_ADDRESS", "RAY_TMPDIR")
_OUTPUT_HELP = "folder for everything written; where it has an earlier run, that one is kept and a number is added"


class PhaseFailed(Exception):
    """A phase ended with a non-zero status; the text says which and why."""


_HERE = Path(__file__).resolve().parent


def _free_folder(wanted: Path) -> Path:
    """``wanted``, or the first of ``wanted-2``, ``wanted-3``, ... that is not there; an empty folder will do too."""
    numbered = (wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(1))
    return next(path for path in numbered if not path.exists() or (path.is_dir() and not any(path.iterdir())))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.quickstart",
        description="GRPO on a small Mixture-of-Experts with engine=epfsdp2, offline, on a machine without a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help=_OUTPUT_HELP)
    parser.add_argument("--seed", type=int, default=1, help="of the weights, the data and the sampling")
    parser.add_argument("--steps", type=int, default=12, help="GRPO steps")
    parser.add_argument("--batch-size", type=int, default=16, help="questions per step")
    parser.add_argument("--group-size", type=int, default=8, help="answers sampled per question")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of GRPO")
    parser.add_argument("--warmup-steps", type=int, default=80, help="supervised steps before GRPO")
    parser.add_argument("--warmup-batch-size", type=int, default=64, help="conversations per supervised step")
    parser.add_argument("--warmup-lr", type=float, default=2e-3, help="learning rate of the warm-up")
    parser.add_argument("--right-share", type=float, default=0.6, help="share of the warm-up's labels that are right")
    parser.add_argument("--model", type=Path, help="start GRPO from this checkpoint of an earlier warm-up")
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="one more Hydra override for GRPO"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, write nothing")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch_size", "group_size", "warmup_steps", "warmup_batch_size"):
        if getattr(options, name) < 2:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it has to be at least 2")
    for name in ("batch_size", "warmup_batch_size"):
        if getattr(options, name) % 2:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(options, name)}; two ranks share it, so it has to be even"
            )
    if options.batch_size > len(task.problems()):
        parser.error(f"--batch-size is {options.batch_size}; there are {len(task.problems())} questions")
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: no config.json there")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the quickstart; 0 where the reward clearly rose and vLLM agreed with the trainer at every step."""
    options = parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        with ProcessTree() as tree:
            return Quickstart(options, console, tree).run()
    except Interrupted as interrupted:
        console.print(f"[yellow]interrupted by {interrupted}; every process of this run has ended[/]")
        return 128 + interrupted.number
    except PhaseFailed as failed:
        console.print(str(failed), style="red", markup=False)
        return 1


class Quickstart:
    """One run: its folder, its options, and its phases in order."""

    def __init__(self, options: argparse.Namespace, console: Console, tree: ProcessTree):
        self.options = options
        self.console = console
        self.tree = tree
        self.output = _free_folder(options.output.resolve())
        self.model = options.model.resolve() if options.model else self.output / "model"
        self.phase_seconds: dict[str, float] = {}
        self.env = {k: v for k, v in os.environ.items() if k not in _RAY_ENV} | _CHILD_ENV
        # vLLM's sockets go where this run cleans up, not into /tmp itself.
        self.env["VLLM_RPC_BASE_PATH"] = str(tree.folder)
        if not torch.accelerator.is_available():
            # Also where torch is a CUDA build on a machine without a GPU, which the platform can't tell by itself.
            self.env["VERL_PLATFORM"] = "cpu"

    def run(self) -> int:
        started = time.monotonic()
        if self.options.dry_run:
            if self.options.model is None:
                self._show("warm-up", warmup_command(self._values()))
                self.model = self._warmed_up()
            self._show("GRPO", grpo_command(self._values(), self.options.override))
            return 0
        self._make_inputs()
        if self.options.model is None:
            self._warm_up()
        steps = self._train()
        return self._conclude(steps, time.monotonic() - started)

    def _values(self) -> dict:
        """What ``$names`` in the override files stand for."""
        data = self.output / "data"
        return vars(self.options) | {
            "output": self.output,
            "model": self.model,
            "warmup_data": data / "warmup.parquet",
            "warmup_batch_of_a_rank": self.options.warmup_batch_size // RANKS,
            "grpo_data": data / "grpo.parquet",
            "reward_file": _HERE / "task.py",
            "sampler_file": _HERE / "sampler.py",
            "ray_dir": self.tree.folder,
        }

    def _make_inputs(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        if self.output != self.options.output.resolve():
            self.console.print(f"{self.options.output} has an earlier run, which is kept")
        options = self.options
        rows = options.warmup_steps * options.warmup_batch_size
        copies = -(-rows // len(task.problems()))
        task.write_datasets(self.output / "data", options.seed, copies, options.right_share)
        if options.model is None:
            with self.console.status("making a model, a tokenizer and data"):
                # Late, because torch and transformers take seconds to import and --help needs neither.
                from transformers.utils import logging

                from .model import write_model

                logging.disable_progress_bar()
                write_model(self.model, options.seed)
        self.console.print(f"model and data in {self.output}")

    def _warm_up(self) -> None:
        options = self.options
        command = warmup_command(self._values())
        metrics = self.output / "warmup.jsonl"
        seen = 0

        def tick() -> None:
            nonlocal seen
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if lines > seen:
                seen = lines
                status.update(f"warm-up: step {seen}/{options.warmup_steps}")

        with self.console.status("warm-up: starting") as status:
            seconds = self._phase("warm-up", command, metrics, tick)
        self.model = self._warmed_up()
        if not (self.model / "config.json").is_file():
            raise PhaseFailed(f"the warm-up ended without a checkpoint in {self.model}")
        self.console.print(f"warm-up: {options.warmup_steps} supervised steps in {seconds:.0f} s -> {self.model}")

    def _warmed_up(self) -> Path:
        """The checkpoint that the warm-up ends with."""
        return self.output / "warmup" / f"global_step_{self.options.warmup_steps}" / "huggingface"

    def _train(self) -> list[Step]:
        command = grpo_command(self._values(), self.options.override)
        self._show("GRPO", command)
        reader = StepReader(self.output / "metrics.jsonl")

        def tick() -> None:
            for step in reader.new_steps():
                self.console.print(
                    f"step {step.number:3d}/{self.options.steps}  reward {step.reward:.3f}  "
                    f"train/rollout difference {step.probs_diff:.1e}  {step.seconds:.1f} s"
                )
                status.update("GRPO")

        with self.console.status("GRPO: starting Ray, two trainer ranks and two vLLM replicas (a minute)") as status:
            self._phase("GRPO", command, self.output / "metrics.jsonl", tick)
        return reader.steps

    def _phase(self, name: str, command: list[str], metrics: Path, tick) -> float:
        started = time.monotonic()
        log = self.output / "logs" / f"{name.lower()}.log"
        status = self.tree.run(command, self.env | {"VERL_FILE_LOGGER_PATH": str(metrics)}, log, tick)
        if status != 0:
            lines = "\n  ".join(cause(log))
            raise PhaseFailed(f"{name} ended with status {status}. The cause, from {log}:\n  {lines}")
        self.phase_seconds[name] = time.monotonic() - started
        return self.phase_seconds[name]

    def _show(self, name: str, command: list[str]) -> None:
        self.console.print(f"\n{name}:")
        self.console.print(pretty(command), markup=False, style="dim")
        self.console.print()

    def _conclude(self, steps: list[Step], seconds: float) -> int:
        options = self.options
        verdict = judge(steps, options.steps, options.batch_size * options.group_size)
        if steps:
            print_summary(self.console, steps, verdict)
        facts = summary(steps, verdict) | {"seconds": {**self.phase_seconds, "total": seconds}}
        (self.output / "summary.json").write_text(json.dumps(facts, indent=2) + "\n")
        self.console.print(f"metrics: {self.output / 'metrics.jsonl'}")
        if steps and write_plot(steps, self.output / "quickstart.png"):
            self.console.print(f"plot: {self.output / 'quickstart.png'}")
        elif steps:
            self.console.print("no plot: matplotlib is not installed (pip install matplotlib draws it next time)")
        if verdict.passed:
            self.console.print(f"[green]the reward rose[/] ({seconds:.0f} s in all)")
            return 0
        for failure in verdict.failures:
            self.console.print(f"FAILED: {failure}", style="red", markup=False)
        return 1
