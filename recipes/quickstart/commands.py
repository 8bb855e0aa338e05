"""The commands of verl's trainers, from the override files beside this one."""

import os
import sys
from pathlib import Path
from string import Template

import yaml

__all__ = ["grpo_command", "overrides", "sglang_environment", "warmup_command"]

_ENGINE = ["engine=epfsdp2", "engine.ep_size=2"]


def overrides(name: str, values: dict) -> list[str]:
    """Return the overrides of ``<name>.yaml``, its ``$names`` replaced by values."""
    lines = yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text())
    return [Template(line).substitute(values) for line in lines]


def warmup_command(values: dict) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*torchrun, "-m", "verl.trainer.sft_trainer", *_ENGINE, *overrides("warmup", values)]


def grpo_command(values: dict, extra: list[str]) -> list[str]:
    return [sys.executable, "-m", "verl.trainer.main_ppo", *_ENGINE, *overrides("grpo", values), *extra]


def sglang_environment() -> dict[str, str]:
    """Return the variables with which SGLang runs without a GPU."""
    paths = [str(Path(sys.prefix) / "lib" / "libcuda"), os.environ.get("LD_LIBRARY_PATH", "")]  # made by .ci/setup
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling its routers takes longer than a short run
        "SGLANG_NCCL_SO_PATH": "none.so",  # two tensor-parallel workers would look for a GPU with it
    }
