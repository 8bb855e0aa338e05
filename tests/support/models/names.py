"""Under which names a process sends experts to vLLM."""

from epfsdp2.engine.model import hf_names

__all__ = ["send_stacks"]


def send_stacks() -> None:
    """Have this process send experts as stacks, as to vLLM since 0.27, whichever is installed."""
    hf_names._takes_stacks = lambda: True
