"""The two commands that the quickstart runs, from the override files beside this one."""

import os
import shlex
import sys
from pathlib import Path
from string import Template

import yaml

__all__ = ["RANKS", "grpo_command", "overrides", "pretty", "sglang_environment", "warmup_command"]

_HERE = Path(__file__).parent
ENGINE = ["engine=epfsdp2", "engine.ep_size=2"]
RANKS = 2


def overrides(name: str, values: dict) -> list[str]:
    """Return the overrides of ``<name>.yaml`` with its ``$names`` filled in.

    Raises:
        KeyError: for a name that ``values`` lacks.
    """
    lines = yaml.safe_load((_HERE / f"{name}.yaml").read_text())
    return [Template(line).substitute(values) for line in lines]


def warmup_command(values: dict) -> list[str]:
    """Return the command of verl's SFT trainer on two ranks, started by this interpreter's torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    return [*torchrun, "-m", "verl.trainer.sft_trainer", *ENGINE, *overrides("warmup", values)]


def grpo_command(values: dict, extra: list[str]) -> list[str]:
    """Return the command of verl's PPO trainer; ``extra`` overrides come last and win."""
    return [sys.executable, "-m", "verl.trainer.main_ppo", *ENGINE, *overrides("grpo", values), *extra]


def sglang_environment() -> dict[str, str]:
    """Return the variables that SGLang needs without a GPU, besides the library that ``.ci/setup`` installs."""
    paths = [str(Path(sys.prefix) / "lib" / "libcuda"), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiled routers, which take longer than a short run
        "SGLANG_NCCL_SO_PATH": "none.so",  # two tensor-parallel workers would look for a GPU with it
    }


def pretty(command: list[str]) -> str:
    """Format the command so that it can be pasted into a shell, one override per line."""
    words = [shlex.quote(word) for word in command]
    if command[0] == sys.executable:
        words[0] = "python"
    first = next((i for i, word in enumerate(command) if "=" in word), len(words))
    return " \\\n    ".join([" ".join(words[: first + 2]), *words[first + 2 :]])
