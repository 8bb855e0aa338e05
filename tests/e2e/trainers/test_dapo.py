"""DAPO end to end: its clipping, groups whose answers are all the same generated anew, its penalty on long answers."""

import pytest

from tests.e2e.runs import finished, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DAPO = [
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
]


def test_dapo_run_filters_groups_and_punishes_long_answers(folder, warmed_up):
    steps = finished(folder / "dapo", 3, "--model", warmed_up, *overrides(*DAPO)).steps()
    assert all(step["actor/grad_norm"] > 0 and step["actor/skipped_steps"] == 0 for step in steps)
    assert all(step["training/rollout_probs_diff_mean"] < 5e-3 for step in steps)
    # Without the penalty no score is below zero.
    assert all(step["critic/score/min"] < 0 for step in steps)
    assert sum(step.get("training/filter_groups/evicted_samples", 0) for step in steps) > 0
