"""Under which names a process sends experts to vLLM."""

from epfsdp2.rollout.vllm import names

__all__ = ["send_stacks"]


def send_stacks() -> None:
    """Make this process send experts as stacks, as to vLLM since 0.27, whichever is installed."""
    names._takes_stacks = lambda: True
