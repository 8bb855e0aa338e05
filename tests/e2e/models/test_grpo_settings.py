"""GRPO with settings of the mesh and the algorithm: vLLM has the trainer's weights before and after the updates."""

import math

import pytest

from tests.e2e.runs import differences, finished, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# Two ranks share every expert.
CUT = ["engine.ep_size=1", "engine.etp_size=2", "engine.rollout_sync=sliced", "engine.rollout_sync_verify=-1"]
CASES = {
    "cut experts": CUT,
    "cut experts, vLLM too": [*CUT, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
    "DAPO": [
        "actor_rollout_ref.actor.clip_ratio_low=0.2",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.actor.clip_ratio_c=10.0",
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        # verl filters in a buffer that it makes itself.
        "trainer.v1.sampler.custom_sampler.path=null",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs.max_resp_len=8",
        # Every token after the second costs a sixth.
        "+reward.reward_kwargs.overlong_buffer_cfg={enable:True,len:6,penalty_factor:1.0,log:False}",
    ],
    "shared rows": ["engine.ulysses_sequence_parallel_size=2", "actor_rollout_ref.actor.use_dynamic_bsz=True"],
}
# Advantages that verl's v1 trainer lacks the data for -> settings, and a logged figure that has the data.
OLDER = {
    "remax": ([], "critic/advantages/max"),
    "optimal_token_baseline": (["actor_rollout_ref.actor.calculate_sum_pi_squared=True"], "variance_proxy/expected_w"),
}


@pytest.mark.parametrize("name", CASES)
def test_grpo_run_trains_and_vllm_has_its_weights(folder, warmed_up, name):
    output = folder / name.replace(" ", "_").replace(",", "")
    steps = finished(output, 3, "--model", warmed_up, *overrides(*CASES[name])).steps()
    assert max(differences(steps)) < (1e-4 if "cut" in name else 5e-3)
    assert all(step["actor/grad_norm"] > 0 and step["actor/skipped_steps"] == 0 for step in steps)
    if name == "DAPO":
        # Without the penalty no score is below zero.
        assert all(step["critic/score/min"] < 0 for step in steps)
        assert sum(step.get("training/filter_groups/evicted_samples", 0) for step in steps) > 0


@pytest.mark.parametrize("advantage", OLDER)
def test_run_of_verls_older_trainer_trains_with(folder, warmed_up, advantage):
    settings, figure = OLDER[advantage]
    options = overrides("trainer.use_v1=False", f"algorithm.adv_estimator={advantage}", *settings)
    steps = finished(folder / advantage, 3, "--model", warmed_up, *options).steps()
    assert all(math.isfinite(step[figure]) and step["actor/grad_norm"] > 0 for step in steps)
    assert max(differences(steps)) < 1e-5
