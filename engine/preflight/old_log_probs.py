"""Whether the forward of an update can give the old log-probs that verl's trainer computes before it."""

from collections.abc import Mapping
from typing import Any

__all__ = ["SETTING", "why_computed"]

SETTING = "engine.old_log_probs_from_update"
_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"


def why_computed(engine: Any, actor: Any, run: Mapping[str, Any]) -> str:
    """Return the settings for which old log-probs are computed before an update; empty if its forward can give them.

    A batch has several updates, or something reads old log-probs before the update.

    Args:
        engine, actor: settings, objects with their fields.
        run: the node ``rollout`` of the actor's config, with settings of the trainer.
    """
    batch, update, replay = run.get("train_batch_size"), actor.ppo_mini_batch_size, engine.router_replay.mode
    others = {
        "data.train_batch_size": f"{batch}, not {update}" if batch != update else "",
        f"{_ACTOR}.ppo_epochs": actor.ppo_epochs if actor.ppo_epochs != 1 else "",
        f"{_ACTOR}.calculate_sum_pi_squared": actor.calculate_sum_pi_squared,
        "algorithm.use_kl_in_reward": run.get("use_kl_in_reward"),
        f"{_CORRECTION}.bypass_mode": run.get("bypass_mode"),
        f"{_CORRECTION}.rollout_is": run.get("rollout_is"),
        f"{_CORRECTION}.rollout_rs": run.get("rollout_rs"),
        "distillation.enabled": run.get("distillation"),
        "engine.router_replay.mode": replay if replay == "R2" else "",
        "engine.indexer_replay": engine.indexer_replay,
        "rollout.nnodes": run.get("separate_nodes"),  # trainers that may compute with the weights of an earlier update
        "trainer.critic_warmup": run.get("critic_warmup"),
    }
    return ", ".join(f"{name}={value}" for name, value in others.items() if value)
