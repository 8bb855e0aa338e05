"""Make a model and data, warm up, train with GRPO, and judge the rewards."""

import argparse
import json
import shlex
from pathlib import Path

from rich.console import Console

from ..launch.failure import cause
from ..launch.processes import Interrupted, ProcessTree
from . import task
from .commands import grpo_command, overrides, sglang_environment, warmup_command
from .metrics import conclude, read_steps
from .model import write_model

__all__ = ["main", "parse"]

_say = Console(highlight=False, soft_wrap=True, markup=False).print


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("quickstart", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, default="runs/quickstart", help="folder; an earlier run is kept, and a number added")
    add("--steps", type=int, default=12, help="GRPO steps")
    add("--batch-size", type=int, default=16, help="questions per step")
    add("--group-size", type=int, default=8, help="answers sampled per question")
    add("--lr", type=float, default=5e-4, help="learning rate of GRPO")
    add("--warmup-steps", type=int, default=80, help="supervised steps before GRPO")
    add("--model", type=Path, help="start GRPO from this checkpoint of an earlier warm-up")
    add("--rollout", choices=("vllm", "sglang"), default="vllm", help="SGLang needs make setup STACK=sglang")
    add("--override", action="append", default=[], metavar="KEY=VALUE", help="one more Hydra override for GRPO")
    add("--dry-run", action="store_true", help="print the commands, write nothing")
    parser.set_defaults(seed=1, warmup_lr=2e-3, warmup_batch_size=64, warmup_batch_of_a_rank=32)
    options = parser.parse_args(arguments)
    if options.batch_size not in range(2, 101, 2):
        parser.error(f"--batch-size is {options.batch_size}; it has to be even, and there are 100 questions")
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}; two are the fewest in which a reward can rise")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if the reward clearly rose and vLLM agreed with the trainer at every step."""
    options = parse(arguments)
    try:
        with ProcessTree() as tree:
            return _run(options, tree)
    except Interrupted as interrupted:
        _say(f"interrupted by {interrupted}; every process of this run has ended")
        return 128 + interrupted.number


def _run(options: argparse.Namespace, tree: ProcessTree) -> int:
    output, number = options.output.resolve(), 2
    while any(output.glob("*")):
        output, number = options.output.resolve().with_name(f"{options.output.name}-{number}"), number + 1
    metrics, env, shown = output / "metrics.jsonl", tree.environment(), 0
    is_sglang = options.rollout == "sglang"
    if is_sglang:
        env |= sglang_environment() | {"TMPDIR": str(tree.folder)}  # where SGLang leaves its sockets
    values = vars(options) | {
        "output": output,
        "model": output / "model",
        "warmup_data": output / "data/warmup.parquet",
        "grpo_data": output / "data/grpo.parquet",
        "reward_file": task.__file__,
        "sampler_file": Path(task.__file__).with_name("sampler.py"),
        "ray_dir": tree.folder,
    }
    commands = {} if options.model else {"warm-up": warmup_command(values)}
    values["model"] = (options.model or output / f"warmup/global_step_{options.warmup_steps}/huggingface").resolve()
    commands["GRPO"] = grpo_command(values, [*(overrides("sglang", {}) if is_sglang else ()), *options.override])
    for name, command in commands.items():
        _say(f"{name}:\n{shlex.join(command)}\n")
    if options.dry_run:
        return 0

    copies = -(-options.warmup_steps * options.warmup_batch_size // 100)
    task.write_datasets(output / "data", options.seed, copies, right_share=0.6)
    if options.model is None:
        write_model(output / "model", options.seed)
    _say(f"model, data, logs and metrics in {output}")

    def show_steps() -> None:
        nonlocal shown
        for step, reward, diff, seconds in read_steps(metrics)[shown:].itertuples(index=False):
            done = f"step {step:3.0f}/{options.steps}  reward {reward:.3f}"
            _say(f"{done}  train/rollout difference {diff:.1e}  {seconds:.1f} s")
            shown += 1

    for name, command in commands.items():
        log = output / "logs" / f"{name.lower()}.log"
        env["VERL_FILE_LOGGER_PATH"] = str(metrics if name == "GRPO" else output / "warmup.jsonl")
        if status := tree.run(command, env, log, show_steps):
            _say("\n  ".join([f"{name} ended with status {status}. The cause, from {log}:", *cause(log)]), style="red")
            return 1
    facts = conclude(read_steps(metrics), options.steps, options.batch_size * options.group_size)
    (output / "summary.json").write_text(json.dumps(facts, indent=2) + "\n")
    for failure in facts["failures"]:
        _say(f"FAILED: {failure}", style="red")
    if facts["passed"]:
        _say("the reward rose from {first_reward:.3f} to {last_reward:.3f}".format(**facts), style="green")
    return 0 if facts["passed"] else 1
