"""A GRPO command for runs under ``recipes/resilient`` that saves each step, and the prompts of its updates."""

import os
from pathlib import Path

import torch

from epfsdp2.recipes.quickstart import task
from epfsdp2.recipes.quickstart.commands import grpo_command
from tests.e2e.runs import HOOKS, ROOT, Run

__all__ = ["check_equal_from", "command", "environment"]

RECIPE = Path(task.__file__).parent


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
        **{"group_size": 4, "batch_size": 16, "seed": 1, "lr": 5e-4, "steps": steps},
        **{"reward_file": reward or RECIPE / "task.py", "sampler_file": RECIPE / "sampler.py", "output": folder},
        **{"grpo_data": data / "grpo.parquet", "model": model, "ray_dir": ray_dir},
    }
    saves = ["trainer.save_freq=1", "trainer.resume_mode=auto", f"trainer.default_local_dir={folder / 'saved'}"]
    agent = "actor_rollout_ref.rollout.agent."
    seeded = ["default_agent_loop=seeded_agent", f"agent_loop_config_path={HOOKS / 'seeded_agent.yaml'}"]
    own = [*(agent + setting for setting in seeded), f"actor_rollout_ref.model.external_lib={hook}"]
    return grpo_command(values, [*saves, *own, *extra])


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
