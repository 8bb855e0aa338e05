"""verl's replay buffer, asked ten times a second whether the answers are complete instead of every two seconds.

The interval is an argument of the buffer that no setting of verl 0.9.1 reaches; ``trainer.v1.sampler.custom_sampler``
is verl's way to make the buffer. Here answers take a second or less: two thirds of a step would be waiting.
"""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

__all__ = ["replay_buffer"]

_POLL_SECONDS = 0.1


def replay_buffer(trainer_mode: str, **settings) -> ReplayBuffer:
    """Make verl's own buffer with a shorter interval.

    Raises:
        ValueError: for ``algorithm.filter_groups``, of which verl tells only a buffer that it makes itself.
    """
    if settings["sampler_kwargs"].get("filter_groups"):
        raise ValueError(
            "algorithm.filter_groups.enable=true: verl does not pass it to a custom sampler, which the quickstart has; "
            "add trainer.v1.sampler.custom_sampler.path=null"
        )
    kind = ReplayBuffer if trainer_mode == "sync" else ReplayBufferAsync
    return kind(trainer_mode=trainer_mode, poll_interval=_POLL_SECONDS, **settings)
