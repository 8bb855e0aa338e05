"""PPO: actor, critic and reference policy, all by this engine; the reward rises, and both trained roles are saved."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.runs import Run, finished, overrides, running
from tests.support.models.tiny import save_qwen3

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 10


def _dense(folder: Path, like: Path) -> Path:
    """Save a dense model with the tokenizer of another, in sizes that vLLM's CPU build supports."""
    tokenizer = AutoTokenizer.from_pretrained(like)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    save_qwen3(folder, vocab_size=len(tokenizer), head_dim=32, **ends)
    tokenizer.save_pretrained(folder)
    return folder


def _said(run: Run) -> str:
    """Return the output of the quickstart and of verl's processes."""
    return "".join([run.text(), *(path.read_text(errors="replace") for path in (run.output / "logs").glob("*.log"))])


def _critic(model: Path) -> list[str]:
    return [
        "algorithm.adv_estimator=gae",
        f"critic.model.path={model}",
        "+critic.model.override_config.attn_implementation=sdpa",
        "critic.model.use_remove_padding=True",
        "critic.ppo_micro_batch_size_per_gpu=32",
        "critic.optim.lr=1e-3",
    ]


def test_ppo_run_with_critic_and_reference_raises_the_reward(folder, warmed_up):
    kept = folder / "ppo_kept"
    settings = overrides(
        *_critic(warmed_up),
        "trainer.critic_warmup=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.kl_coef=0.001",
        f"trainer.save_freq={STEPS}",
        f"trainer.default_local_dir={kept}",
    )
    steps = finished(folder / "ppo", STEPS, "--model", warmed_up, *settings).steps()
    # Nothing of the actor has changed while the critic warms up; then it leaves the reference.
    moved = [step.get("actor/kl_loss") for step in steps]
    assert moved[0] is None and moved[-1] > moved[2] >= 0, moved
    assert all(step["critic/vf_loss"] >= 0 and step["critic/grad_norm"] > 0 for step in steps)
    rewards = [step["critic/score/mean"] for step in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    for role in ("actor", "critic"):
        assert (kept / f"global_step_{STEPS}" / role / MANIFEST).is_file()


def test_ppo_run_with_a_dense_critic_beside_experts_trains_both(folder):
    actor, kept = folder / "untrained", folder / "dense_critic_kept"
    write_model(actor, seed=0)
    critic = _dense(folder / "dense_critic", actor)
    settings = overrides(*_critic(critic), "trainer.save_freq=3", f"trainer.default_local_dir={kept}")
    run = finished(folder / "beside", 3, "--model", str(actor), *settings)
    steps, said = run.steps(), _said(run)
    assert f"{critic} has no experts: engine.ep_size=2 does not apply, FSDP2 over all ranks" in said
    assert f"{actor} has no experts" not in said
    assert all(step["critic/grad_norm"] > 0 and step["actor/grad_norm"] > 0 for step in steps)
    for role in ("actor", "critic"):
        assert (kept / "global_step_3" / role / MANIFEST).is_file()


def test_ppo_run_of_a_dense_actor_trains_and_refuses_ep_size(folder):
    write_model(folder / "like", seed=0)
    model = _dense(folder / "dense_actor", folder / "like")
    with running(folder / "refused", "--model", str(model), "--steps", "2") as run:
        run.wait()
    assert run.process.returncode != 0 and not run.steps()
    assert "engine.ep_size=2: concerns experts, and Qwen3ForCausalLM" in _said(run)
    # Its answers are all wrong, so that no advantage would move it.
    settings = overrides("engine.ep_size=1", "actor_rollout_ref.actor.entropy_coeff=0.01")
    steps = finished(folder / "alone", 2, "--model", str(model), *settings).steps()
    # vLLM generates with the trained weights.
    assert all(step["training/rollout_probs_diff_mean"] < 1e-4 and step["actor/grad_norm"] > 0 for step in steps)
