"""A GRPO command for runs under ``recipes/resilient`` that saves each step, and the prompts of its updates."""

import os
from pathlib import Path

import psutil
import torch

from epfsdp2.recipes.quickstart import task
from epfsdp2.recipes.quickstart.commands import grpo_command
from tests.e2e.runs import HOOKS, ROOT, Run

__all__ = ["KINDS", "check_equal_from", "command", "environment", "processes"]

RECIPE = Path(task.__file__).parent
# Trainer ranks, vLLM's servers and engines, verl's trainer, its driver, Ray's daemons.
KINDS = (
    "ray::WorkerDict",
    "ray::vLLMHttpServer",
    "VLLM::",
    "ray::TaskRunner",
    "verl.trainer.main_ppo",
    "raylet",
    "gcs",
)


def command(folder: Path, model: str, ray_dir: str, *extra: str, steps: int, hook: str, reward: Path | None = None):
    """The words of verl's trainer that saves each step below ``folder``, with samples that do not depend on timing.

    Args:
        hook: the module of ``hooks`` that verl's workers import.
        reward: the file of the reward function; the quickstart's by default.
    """
    data = folder.parent / "data"
    if not data.exists():
        task.write_datasets(data, 1, 4, 0.6)
    values = {
        **{
            "group_size": 4,
            "batch_size": 16,
            "seed": 1,
            "lr": 5e-4,
            "steps": steps,
            "grpo_data": data / "grpo.parquet",
        },
        **{"reward_file": reward or RECIPE / "task.py", "sampler_file": RECIPE / "sampler.py", "output": folder},
        **{"model": model, "ray_dir": ray_dir},
    }
    saves = ["trainer.save_freq=1", "trainer.resume_mode=auto", f"trainer.default_local_dir={folder / 'saved'}"]
    agent = "actor_rollout_ref.rollout.agent"
    seeded = [
        f"{agent}.default_agent_loop=seeded_agent",
        f"{agent}.agent_loop_config_path={HOOKS / 'seeded_agent.yaml'}",
    ]
    return grpo_command(values, [*saves, *seeded, f"actor_rollout_ref.model.external_lib={hook}", *extra])


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The variables of such a run and of what it starts, with those of ``hooks/batches.py``."""
    return {
        **{"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
        **{"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")},
        **{"EPFSDP2_TEST_BATCHES": str(folder / "batches"), **more},
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOOKS), str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def _prompts(folder: Path) -> list[list[list[int]]]:
    """The prompts of each mini-batch of all ranks, in the order of the updates; those of one are sorted.

    An attempt's numbers begin at 0 again and replace those of the attempt before it.
    """
    found: dict[str, list[list[int]]] = {}
    for path in (folder / "batches").glob("*.pt"):
        found.setdefault(path.name.partition("-")[0], []).extend(p.tolist() for p in torch.load(path)["prompts"])
    return [sorted(found[update]) for update in sorted(found)]


def check_equal_from(step: int, run: Run, unbroken: Run) -> None:
    """Two runs, each in its ``output``, have made the same two steps from this one on, of the same prompts."""
    for each in (run, unbroken):
        assert [made["training/global_step"] for made in each.steps()] == [step, step + 1]
    assert _prompts(run.output)[:2] == _prompts(unbroken.output)
    for mine, wanted in zip(run.steps(), unbroken.steps(), strict=True):
        assert mine["critic/score/mean"] == wanted["critic/score/mean"]


def processes(run: Run) -> dict[str, list[psutil.Process]]:
    """Return the processes that a run can't go on without, by their kind (``KINDS``)."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process(run.process.pid).children(recursive=True):
        try:
            words = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        program = Path(words.split(" ")[0]).name if words else ""
        for kind in KINDS:
            if program.startswith(kind) or kind == "verl.trainer.main_ppo" and f"-m {kind}" in words:
                found.setdefault(kind, []).append(process)
    return found
