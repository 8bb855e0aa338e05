"""Every trainer of verl with ``engine=epfsdp2``: vLLM has the weights that it should have, and nothing is left behind.

The v1 trainers ``sync`` and ``separate_async`` are in ``test_quickstart.py`` and ``test_standalone.py``.
"""

import json

import pytest

from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.runs import leftovers, overrides, running, unused

pytestmark = pytest.mark.e2e

# A model that knows nothing earns no reward to learn from; this changes its weights all the same.
CHANGES = ["actor_rollout_ref.actor.entropy_coeff=1.0"]
# Learning rates of four updates: all, half, none, half.
ZERO_IN_THE_THIRD = [
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.num_cycles=1.0",
]
# One worker generates, in a process of its own; verl has old log-probs from the trainer, to compare with vLLM's.
SEPARATE = [
    "actor_rollout_ref.hybrid_engine=False",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=epfsdp2_p2p",
    "algorithm.rollout_correction.bypass_mode=False",
    "ray_kwargs.ray_init.num_gpus=3",
    "ray_kwargs.ray_init.num_cpus=64",
]
SAME, OTHER = 1e-5, 1e-3


def _steps(tmp_path, steps: int, *settings: str, **program) -> list[dict]:
    """What it logged; it has to end well and leave nothing."""
    write_model(tmp_path / "model", 1)
    options = ["--model", str(tmp_path / "model"), "--steps", str(steps), "--batch-size", "8"]
    before = leftovers()
    with running(tmp_path / "run", *options, *overrides(*CHANGES, *settings), **program) as run:
        run.wait()
    logged = [step for step in run.steps() if "actor/grad_norm" in step]
    assert len(logged) == steps, run.text()[-3000:]
    assert all(step["actor/grad_norm"] > 0 for step in logged)
    assert run.living() == []
    assert unused(leftovers() - before) == set()
    return logged


def _differences(steps: list[dict]) -> list[float]:
    return [step["training/rollout_probs_diff_mean"] for step in steps]


def _is_learning(steps: list[dict]) -> bool:
    """The entropy rises, which is all that these runs learn."""
    entropies = [step["actor/entropy"] for step in steps]
    return entropies[-1] > entropies[0] + 0.05


def test_sft_trainer_lowers_the_loss(first_run):
    """The quickstart's warm-up."""
    lines = (first_run.output / "warmup.jsonl").read_text().splitlines()
    losses = [data["train/loss"] for data in (json.loads(line)["data"] for line in lines) if "train/loss" in data]
    assert len(losses) == 80
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10]), losses


@pytest.mark.long
def test_colocate_async_trainer_trains(tmp_path):
    steps = _steps(tmp_path, 4, "trainer.v1.trainer_mode=colocate_async", *ZERO_IN_THE_THIRD)
    # Generation runs ahead, by a part of a batch: a sample is at most one update older than what it is compared with.
    assert all(step["training/off_policy/trajectory_staleness/max"] <= 1 for step in steps)
    differences = _differences(steps)
    assert differences[0] < SAME and differences[3] < SAME, differences
    assert _is_learning(steps[:3])


@pytest.mark.long
def test_one_step_off_trainer_trains(tmp_path):
    """It generates a batch while it trains on the one before, so samples are always one update older."""
    program = ("other_trainer", "verl.experimental.one_step_off_policy.main_ppo")
    first, second, third, fourth = _differences(_steps(tmp_path, 4, *SEPARATE, *ZERO_IN_THE_THIRD, program=program))
    assert first < SAME and second > OTHER and third > OTHER and fourth < SAME, (first, second, third, fourth)


@pytest.mark.long
def test_fully_async_trainer_trains(tmp_path):
    """Without staleness it generates for one update at a time, always with the weights of the one before."""
    settings = [
        "rollout.total_rollout_steps=32",  # four updates; verl logs each with the next
        "rollout.n=8",
        "async_training.trigger_parameter_sync_step=1",
        "async_training.staleness_threshold=0",
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
    ]
    program = ("other_trainer", "verl.experimental.fully_async_policy.fully_async_main")
    steps = _steps(tmp_path, 3, *SEPARATE, *settings, program=program)
    assert all(difference < SAME for difference in _differences(steps)), _differences(steps)
    assert _is_learning(steps)
