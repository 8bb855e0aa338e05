"""GRPO on images: verl's trainer, Ray, a rollout that sees images, a sharded Qwen3-VL-MoE with its vision tower.

The rollout is SGLang on its stack, and vLLM on the others.
"""

import pytest

from tests.e2e.models import image_task
from tests.e2e.runs import SERVER, overrides, running
from tests.rollout.served_families import SERVED

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_grpo_run_on_images_trains(tmp_path):
    model, data = image_task.write_task(tmp_path, rows=40)
    settings = overrides(
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.max_prompt_length=32",
        f"data.custom_cls.path={image_task.__file__}",
        "data.custom_cls.name=Pictures",
        f"reward.custom_reward_function.path={image_task.__file__}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.max_num_batched_tokens=64",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt={image:1,video:0}",
    )
    options = ["--model", str(model), "--steps", "3", "--batch-size", "10", "--group-size", "4", "--lr", "1e-3"]
    environment = SERVED["qwen3_vl_moe"].environment
    with running(tmp_path / "run", *options, *SERVER, *settings, environment=environment) as run:
        run.wait()
    steps = run.steps()
    assert len(steps) == 3, run.text()[-3000:] + (run.output / "logs/grpo.log").read_text(errors="replace")[-6000:]
    # vLLM sees the images that the trainer sees, by the weights that the trainer has after each update.
    assert all(step["training/rollout_probs_diff_mean"] < 1e-5 for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
