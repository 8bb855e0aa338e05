"""verl's replay buffer with a poll of 0.1 s in place of two seconds, which is most of a step with answers this short.

No setting of verl 0.9.1 reaches the interval; ``trainer.v1.sampler.custom_sampler`` names this function.
"""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

__all__ = ["replay_buffer"]


def replay_buffer(trainer_mode: str, **settings) -> ReplayBuffer:
    """Build verl's own buffer; raise ``ValueError`` for ``algorithm.filter_groups``."""
    if settings["sampler_kwargs"].get("filter_groups"):
        works = "add trainer.v1.sampler.custom_sampler.path=null"
        raise ValueError(f"algorithm.filter_groups.enable=true: verl passes it to no custom sampler; {works}")
    kind = ReplayBuffer if trainer_mode == "sync" else ReplayBufferAsync
    return kind(trainer_mode=trainer_mode, poll_interval=0.1, **settings)
