"""PPO: actor, critic and reference policy, all by this engine; the reward rises, and both trained roles are saved."""

import pytest

from epfsdp2.engine.manifest import MANIFEST
from tests.e2e.conftest import overrides, running

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 10


def test_the_reward_of_ppo_with_critic_and_reference_rises(folder, warmed_up):
    kept = folder / "ppo_kept"
    settings = overrides(
        "algorithm.adv_estimator=gae",
        f"critic.model.path={warmed_up}",
        "+critic.model.override_config.attn_implementation=sdpa",
        "critic.model.use_remove_padding=True",
        "critic.ppo_micro_batch_size_per_gpu=32",
        "critic.optim.lr=1e-3",
        "trainer.critic_warmup=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.kl_coef=0.001",
        f"trainer.save_freq={STEPS}",
        f"trainer.default_local_dir={kept}",
    )
    with running(folder / "ppo", "--model", warmed_up, "--steps", str(STEPS), *settings) as run:
        run.wait()
    steps = run.steps()
    assert len(steps) == STEPS, run.text()[-3000:]
    # Nothing of the actor has changed while the critic warms up; then it leaves the reference.
    moved = [step.get("actor/kl_loss") for step in steps]
    assert moved[0] is None and moved[-1] > moved[2] >= 0, moved
    assert all(step["critic/vf_loss"] >= 0 and step["critic/grad_norm"] > 0 for step in steps)
    rewards = [step["critic/score/mean"] for step in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    for role in ("actor", "critic"):
        assert (kept / f"global_step_{STEPS}" / role / MANIFEST).is_file()
