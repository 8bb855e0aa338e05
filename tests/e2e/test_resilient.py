"""A real GRPO run under ``recipes/resilient``: a trainer rank is killed in an update, and SIGTERM saves first."""

import json
import os
import shutil
import signal
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST, verify_files
from epfsdp2.recipes.quickstart import task
from epfsdp2.recipes.quickstart.commands import grpo_command
from epfsdp2.recipes.resilient.cluster import living_gpus
from tests.e2e.runs import HOOKS, leftovers, running, unused

pytestmark = [pytest.mark.e2e, pytest.mark.long]

RECIPE = Path(task.__file__).parent


def _command(folder: Path, model: str, ray_dir: str, *extra: str) -> list[str]:
    data = folder.parent / "data"
    if not data.exists():
        task.write_datasets(data, 1, 4, 0.6)
    values = {
        **{"group_size": 4, "batch_size": 16, "seed": 1, "lr": 5e-4, "steps": 4, "grpo_data": data / "grpo.parquet"},
        **{"reward_file": RECIPE / "task.py", "sampler_file": RECIPE / "sampler.py", "output": folder},
        **{"model": model, "ray_dir": ray_dir},
    }
    saves = ["trainer.save_freq=1", "trainer.resume_mode=auto", f"trainer.default_local_dir={folder / 'saved'}"]
    return grpo_command(values, [*saves, "actor_rollout_ref.model.external_lib=killed_in_update", *extra])


@contextmanager
def _running(
    folder: Path, model: str, *extra: str, program=("epfsdp2.recipes.resilient", "--backoff-seconds", "1", "--")
):
    """The recipe on a run of four steps; a run without the recipe for an empty ``program``."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **{"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
        **{"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")},
        **{"EPFSDP2_TEST_BATCHES": str(folder / "batches"), "EPFSDP2_TEST_KILLED": str(folder / "killed")},
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOOKS), os.environ.get("PYTHONPATH")])),
    }
    with tempfile.TemporaryDirectory(prefix="epr-", dir="/tmp") as ray_dir:
        if not program:
            environment["VLLM_RPC_BASE_PATH"] = ray_dir  # which the recipe sets itself
        words = _command(folder, model, ray_dir, *extra)
        module = [*program, *words] if program else words[words.index("-m") + 1 :]
        with running(folder, program=module, environment=environment) as run:
            yield run


def _inputs(folder: Path) -> list[torch.Tensor]:
    """The prompts of each mini-batch of rank 0, in the order of the updates."""
    return [
        torch.cat([prompt.flatten() for prompt in torch.load(path)["prompts"]])
        for path in sorted((folder / "batches").glob("*-0.pt"))
    ]


def test_resilient_run_whose_rank_is_killed_in_an_update_equals_an_uninterrupted_run(folder, warmed_up):
    before, broken, whole = leftovers(), folder / "broken", folder / "whole"
    with _running(broken, warmed_up) as run:
        run.wait()
    assert run.process.returncode == 0, run.text()[-3000:]
    assert (broken / "killed").exists() and "starts again from step 2" in run.text()
    assert run.living() == [] and unused(leftovers() - before) == set()
    saved = broken / "saved"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4"
    for step in (1, 2, 3, 4):
        verify_files(saved / f"global_step_{step}" / "actor")
    assert sorted(path.name for path in (saved / "resilient").iterdir()) == ["attempt-1.log", "attempt-2.log"]

    (whole / "saved").mkdir(parents=True)
    shutil.copytree(saved / "global_step_2", whole / "saved" / "global_step_2")
    (whole / "killed").touch()
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole / 'saved' / 'global_step_2'}"]
    with _running(whole, warmed_up, *resumed, program=()) as unbroken:
        unbroken.wait()
    assert unbroken.process.returncode == 0, unbroken.text()[-3000:]
    assert [step["training/global_step"] for step in run.steps()] == [3, 4]
    assert [step["training/global_step"] for step in unbroken.steps()] == [3, 4]
    # The second attempt's numbers begin at 0 again and replace the first one's.
    for mine, wanted in zip(_inputs(broken)[:2], _inputs(whole), strict=True):
        assert torch.equal(mine, wanted)
    for mine, wanted in zip(run.steps(), unbroken.steps(), strict=True):
        assert mine["critic/score/mean"] == wanted["critic/score/mean"]


def test_living_gpus_of_a_real_cluster_leaves_out_nodes_that_stopped():
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="epr-", dir="/tmp") as ray_dir:
        arguments = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 100_000_000}
        head = {**arguments, "include_dashboard": False, "_temp_dir": ray_dir}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            second = cluster.add_node(**arguments | {"num_gpus": 4})
            assert sorted(living_gpus(cluster.address)) == [2, 4]
            cluster.remove_node(second, allow_graceful=False)
            deadline = time.monotonic() + 60
            while living_gpus(cluster.address) != [2]:
                assert time.monotonic() < deadline
        finally:
            cluster.shutdown()
        assert living_gpus(cluster.address) == []  # nobody answers


def test_resilient_run_at_sigterm_saves_the_step_before_it_ends(folder, warmed_up):
    before, cut = leftovers(), folder / "cut"
    cut.mkdir()
    (cut / "killed").touch()
    changed = ["trainer.save_freq=1000", "trainer.total_training_steps=500", "trainer.total_epochs=500"]
    program = ("epfsdp2.recipes.resilient", "--grace-seconds", "300", "--")
    with _running(cut, warmed_up, *changed, program=program) as run:
        run.wait(until=lambda: len(run.steps()) >= 2)
        assert run.process.poll() is None, run.text()[-3000:]
        run.process.send_signal(signal.SIGTERM)
        status = run.process.wait(timeout=360)
    assert status == 128 + signal.SIGTERM, run.text()[-3000:]
    step = int((cut / "saved" / "latest_checkpointed_iteration.txt").read_text())
    assert step >= 2 and f"step {step} is saved" in run.text()
    assert (
        json.loads((cut / "saved" / f"global_step_{step}" / "actor" / "trainer_state.json").read_text())["step"] == step
    )
    assert (cut / "saved" / f"global_step_{step}" / "actor" / MANIFEST).is_file()
    assert run.living() == [] and unused(leftovers() - before) == set()
