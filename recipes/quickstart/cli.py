"""Make a model and data, warm up, train with GRPO, and judge the rewards."""

import argparse
import itertools
import json
import time
from pathlib import Path

from rich.console import Console

from . import task
from .commands import RANKS, grpo_command, overrides, pretty, sglang_environment, warmup_command
from .failure import cause
from .metrics import PROBS_DIFF, REWARD, SECONDS, conclude, print_summary, read_steps
from .processes import Interrupted, ProcessTree

__all__ = ["main", "parse"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.quickstart",
        description="GRPO on a small Mixture-of-Experts with engine=epfsdp2, offline, on a machine without a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    kept = "folder for everything written; an earlier run there is kept, and a number added"
    add("--output", type=Path, default=Path("runs/quickstart"), help=kept)
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
    servers = "the rollout engine (SGLang: make setup STACK=sglang)"
    add("--rollout", choices=("vllm", "sglang"), default="vllm", help=servers)
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
    """Return 0 if the reward clearly rose and vLLM agreed with the trainer at every step."""
    options, console = parse(arguments), Console(highlight=False, soft_wrap=True)
    try:
        with ProcessTree() as tree:
            return _run(options, console, tree)
    except Interrupted as interrupted:
        console.print(f"[yellow]interrupted by {interrupted}; every process of this run has ended[/]")
        return 128 + interrupted.number


def _run(options: argparse.Namespace, console: Console, tree: ProcessTree) -> int:
    started, wanted = time.monotonic(), options.output.resolve()
    folders = itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2)))
    output = next(path for path in folders if not path.exists() or (path.is_dir() and not any(path.iterdir())))
    metrics, here = output / "metrics.jsonl", Path(__file__).resolve().parent
    values = vars(options) | {
        "output": output,
        "model": output / "model",
        "warmup_data": output / "data/warmup.parquet",
        "warmup_batch_of_a_rank": options.warmup_batch_size // RANKS,
        "grpo_data": output / "data/grpo.parquet",
        "reward_file": here / "task.py",
        "sampler_file": here / "sampler.py",
        "ray_dir": tree.folder,
    }
    commands = {} if options.model else {"warm-up": warmup_command(values)}
    values["model"] = (options.model or output / f"warmup/global_step_{options.warmup_steps}/huggingface").resolve()
    servers = overrides("sglang", {}) if options.rollout == "sglang" else []
    commands["GRPO"] = grpo_command(values, [*servers, *options.override])
    if options.dry_run:
        for name, command in commands.items():
            console.print(f"\n{name}:\n{pretty(command)}\n", markup=False)
        return 0

    output.mkdir(parents=True, exist_ok=True)
    if output != wanted:
        console.print(f"{options.output} has an earlier run, which is kept")
    copies = -(-options.warmup_steps * options.warmup_batch_size // len(task.problems()))
    task.write_datasets(output / "data", options.seed, copies, options.right_share)
    if options.model is None:
        from .model import write_model  # transformers takes seconds to import, and --help does not need it

        write_model(output / "model", options.seed)
    console.print(f"model and data in {output}")

    env, seconds, printed = tree.environment(), {}, 0
    if options.rollout == "sglang":
        env |= sglang_environment() | {"TMPDIR": str(tree.folder)}  # where SGLang leaves its sockets

    def show_steps() -> None:
        nonlocal printed
        for step in read_steps(metrics)[printed:]:
            console.print(
                f"step {step['step']:3d}/{options.steps}  reward {step[REWARD]:.3f}  "
                f"train/rollout difference {step[PROBS_DIFF]:.1e}  {step[SECONDS]:.1f} s"
            )
            printed += 1

    for name, command in commands.items():
        begun, log = time.monotonic(), output / "logs" / f"{name.lower()}.log"
        console.print(f"\n{name}:\n{pretty(command)}\n", markup=False)
        env["VERL_FILE_LOGGER_PATH"] = str(metrics if name == "GRPO" else output / "warmup.jsonl")
        if status := tree.run(command, env, log, show_steps):
            failure = "\n  ".join([f"{name} ended with status {status}. The cause, from {log}:", *cause(log)])
            console.print(failure, style="red", markup=False)
            return 1
        seconds[name] = time.monotonic() - begun
        console.print(f"{name} took {seconds[name]:.0f} s")

    seconds["total"], steps = time.monotonic() - started, read_steps(metrics)
    facts = conclude(steps, options.steps, options.batch_size * options.group_size)
    if len(steps) > 1:
        print_summary(console, facts)
    (output / "summary.json").write_text(json.dumps(facts | {"seconds": seconds}, indent=2) + "\n")
    console.print(f"metrics: {metrics}")
    if facts["passed"]:
        console.print(f"[green]the reward rose[/] ({seconds['total']:.0f} s in all)")
    for failure in facts["failures"]:
        console.print(f"FAILED: {failure}", style="red", markup=False)
    return 0 if facts["passed"] else 1
