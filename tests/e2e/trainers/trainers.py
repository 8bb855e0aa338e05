"""Runs of verl's trainers that generate in separate processes, and checks of their steps."""

import re

from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.runs import leftovers, overrides, running, unused

__all__ = [
    "ADAPTERS",
    "CHANGES",
    "FEW",
    "FULLY_ASYNC",
    "ONE_STEP_OFF",
    "OTHER",
    "SAME",
    "SEPARATE",
    "STANDALONE",
    "ONE_AT_A_TIME",
    "ZERO_IN_THE_THIRD",
    "differences",
    "is_learning",
    "steps_of",
    "syncs",
]

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
FEW = 1e-4  # what an update of adapters changes at least
# Adapters that vLLM computes with itself, every sync with checksums.
ADAPTERS = [
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=32",
    "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj]",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "engine.rollout_sync_verify=-1",
]
# verl's v1 trainer ``separate_async``.
STANDALONE = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=epfsdp2_p2p",
    "ray_kwargs.ray_init.num_gpus=3",
    "engine.rollout_sync=auto",
    *CHANGES,
    *ZERO_IN_THE_THIRD,
]
ONE_STEP_OFF = ("other_trainer", "verl.experimental.one_step_off_policy.main_ppo")
FULLY_ASYNC = ("other_trainer", "verl.experimental.fully_async_policy.fully_async_main")
# Without staleness it generates for one update at a time.
ONE_AT_A_TIME = [
    "rollout.total_rollout_steps=32",  # four updates; verl logs each with the next
    "rollout.n=8",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=0",
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
]


def steps_of(tmp_path, steps: int, *settings: str, rollout: str = "vllm", **program) -> list[dict]:
    """Return the logged steps of a run, which has to end well and leave nothing."""
    write_model(tmp_path / "model", 1)
    options = ["--model", str(tmp_path / "model"), "--steps", str(steps), "--batch-size", "8", "--rollout", rollout]
    before = leftovers()
    with running(tmp_path / "run", *options, *overrides(*CHANGES, *settings), **program) as run:
        run.wait()
    logged = [step for step in run.steps() if "actor/grad_norm" in step]
    assert len(logged) == steps, run.text()[-3000:]
    assert all(step["actor/grad_norm"] > 0 for step in logged)
    assert run.living() == []
    left = unused(leftovers() - before)
    assert not left, left
    return logged


def differences(steps: list[dict]) -> list[float]:
    return [step["training/rollout_probs_diff_mean"] for step in steps]


def is_learning(steps: list[dict]) -> bool:
    """The entropy rises, which is all that these runs learn."""
    entropies = [step["actor/entropy"] for step in steps]
    return entropies[-1] > entropies[0] + 0.05


def syncs(output) -> list[str]:
    """Return the kind of each weight sync of a run, as a rollout worker has printed it."""
    log = (output / "logs" / "grpo.log").read_text(errors="replace")
    return re.findall(r"weight sync \d+, (\w+)", log)
