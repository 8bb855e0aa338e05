"""verl's SGLang server adapter, which then also sends from a machine without a GPU."""

from typing import Any

__all__ = ["ADAPTER"]

ADAPTER = f"{__name__}.ServerAdapter"  # as verl's registry names it


def __getattr__(name: str) -> Any:
    # Looked up on first use: it imports SGLang, which a process of another rollout may lack.
    if name != "ServerAdapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

    from . import cpu_shim

    cpu_shim.install()
    return ServerAdapter
