"""GRPO on images: verl's trainer, Ray, a rollout that sees images, a sharded model with its vision tower.

The rollout is SGLang on its stack, and vLLM on the others.
"""

from pathlib import Path

import pytest

from tests.e2e.models import image_task, small_families
from tests.e2e.runs import SERVER, overrides, running
from tests.rollout.served_families import SERVED

pytestmark = [pytest.mark.e2e, pytest.mark.long]


# Bounds of the mean difference of probabilities to vLLM. Another image changes them by 2e-2.
SAME = {"float32": 1e-5, "bfloat16": 1e-2}
GEO3K = Path(__file__).parents[1] / "trainers/data/examples-grpo_trainer-run_qwen3_5_35b_fsdp.json"


def _check_run(tmp_path, family, **program):
    """Run three steps; vLLM sees the images that the trainer sees, by the weights after each update."""
    served = SERVED[family]
    served.skip_where_broken()
    model, data = image_task.write_task(tmp_path, family, rows=40)
    settings = overrides(
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.max_prompt_length=32",
        f"data.custom_cls.path={image_task.__file__}",
        "data.custom_cls.name=Pictures",
        "data.filter_overlong_prompts=False",  # verl's filter loads images itself, and a script asks for it
        f"reward.custom_reward_function.path={image_task.__file__}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.max_num_batched_tokens=64",
        *small_families.settings(family, {"limit_mm_per_prompt": {"image": 1, "video": 0}}),
    )
    options = ["--model", str(model), "--steps", "3", "--batch-size", "10", "--group-size", "4", "--lr", "1e-3"]
    with running(tmp_path / "run", *options, *SERVER, *settings, environment=served.environment, **program) as run:
        run.wait()
    steps = [step for step in run.steps() if "actor/grad_norm" in step]
    assert len(steps) == 3, run.text()[-3000:] + (run.output / "logs/grpo.log").read_text(errors="replace")[-6000:]
    assert all(step["prompt_length/max"] > 6 for step in steps)  # verl goes on without prompts that fail
    assert max(mean := [step["training/rollout_probs_diff_mean"] for step in steps]) < SAME[served.dtype], mean
    assert all(step["actor/grad_norm"] > 0 for step in steps)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe_vl"])
def test_grpo_run_on_images_trains(family, tmp_path):
    _check_run(tmp_path, family)


def test_geo3k_script_with_two_words_trains(tmp_path):
    """verl's script of Qwen3.5-35B, as ``trainers/test_verl_scripts.py`` runs others, on the task's images."""
    _check_run(tmp_path, "qwen3_5_moe_vl", program=("verl_script", str(GEO3K)))
