"""Advantages that verl's v1 trainer lacks the data for, by its older trainer; the reward rises."""

import math

import pytest

from tests.e2e.runs import differences, finished, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 10
# Advantage -> settings, and a logged figure that has this advantage's data.
ADVANTAGES = {
    "remax": ([], "critic/advantages/max"),
    "optimal_token_baseline": (
        ["actor_rollout_ref.actor.calculate_sum_pi_squared=True"],
        "variance_proxy/expected_w",
    ),
}


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_run_of_verls_older_trainer_raises_the_reward_with(folder, warmed_up, advantage):
    settings, figure = ADVANTAGES[advantage]
    options = overrides("trainer.use_v1=False", f"algorithm.adv_estimator={advantage}", *settings)
    run = finished(folder / advantage, STEPS, "--model", warmed_up, *options)
    steps = run.steps()
    assert all(math.isfinite(step[figure]) and step["actor/grad_norm"] > 0 for step in steps)
    assert max(differences(steps)) < 1e-5
    rewards = [step["critic/score/mean"] for step in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.1, rewards
