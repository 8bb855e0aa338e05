"""Keys of verl's rollout config that all servers share; functions accept it as a mapping or as verl's dataclass."""

from collections.abc import Mapping
from typing import Any

__all__ = ["BACKEND", "BLOCK", "ROLLOUT", "server_arguments", "size_of"]

ROLLOUT = "actor_rollout_ref.rollout"
BACKEND = "epfsdp2_p2p"  # this package's checkpoint engine, for rollouts in processes of their own
BLOCK = 128  # rows and columns of a block with rollout.quantization=fp8, which verl fixes (``_apply_quantization``)


def size_of(config: Any, name: str) -> int:
    size = config.get(name)
    return 1 if size is None else size


def server_arguments(config: Any, server: str) -> Mapping[str, Any]:
    """Return the user's arguments of the server itself (``engine_kwargs``)."""
    return (config.get("engine_kwargs") or {}).get(server) or {}
