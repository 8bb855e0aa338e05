"""The rollout engines with known layouts, each in a folder of its own, and the choice of a run's engine and mode.

Functions accept verl's rollout config as a mapping or as verl's dataclass.
"""

from collections.abc import Iterable
from typing import Any

from ..engine.compat import versions
from ..engine.errors import SettingError
from .layout.layout_check import RANK, entry, rank_entry
from .layout.rollout_config import BACKEND, ROLLOUT
from .layout.server import Server
from .layout.slices import has_known_rows, kept_slices, scale_slices
from .layout.specs import Heads, Rollout, SyncMode, TargetSlice, TensorSpec
from .sglang.server import SGLANG
from .vllm.server import VLLM

__all__ = ["BACKEND", "DEFAULT", "SERVERS", "choose_mode", "install", "is_quantised", "planned_layout"]
__all__ += ["server_named", "server_of", "slices_of_scales", "target_slices", "untested"]

DEFAULT: Server = VLLM
SERVERS: dict[str, Server] = {server.name: server for server in (VLLM, SGLANG)}
_SETTING = "engine.rollout_sync"


def server_named(name: str | None) -> Server:
    """Return the server of verl's name; without a folder here, one that accepts full tensors only."""
    return SERVERS.get(name or DEFAULT.name) or Server(name or "")


def server_of(config: Any) -> Server:
    return server_named(config.get("name"))


def install(timeout_seconds: float) -> None:
    """Register our adapters with verl, before it builds the rollout; each message has this time-out."""
    for server in SERVERS.values():
        server.install(timeout_seconds)


def choose_mode(
    requested: str, config: Any, family: str | None, *, backend: str = "naive", drafts: bool = False
) -> tuple[SyncMode, str]:
    """Return the sync mode for a rollout and, if ``auto`` falls back to ``full``, the reason.

    Args:
        requested: ``engine.rollout_sync``; ``SettingError`` if the rollout does not support it.
        family: ``model_type`` of the model; None skips its check.
        backend: the checkpoint-engine backend.
        drafts: whether the rollout drafts with the model's multi-token prediction layers.
    """
    if requested == "full":
        return "full", ""
    server = server_of(config)
    rollout = server.rollout_of(config)
    found = _obstacle(server, config, family, backend, drafts)
    if found is None:
        return "sliced", ""
    cause = f"{found.setting}={found.value}: {found.rule}"
    if requested == "auto":
        is_as_good = rollout.workers == 1 and server.is_as_fast_in_full and not rollout.is_quantised
        return "full", "" if is_as_good else cause
    works = f"{_SETTING}=auto" + (f", or {found.setting}={found.works}" if found.works else "")
    raise SettingError(_SETTING, requested, f"can't be with {cause}", works)


def _obstacle(server: Server, config: Any, family: str | None, backend: str, drafts: bool) -> SettingError | None:
    if server.name not in SERVERS:
        return SettingError(f"{ROLLOUT}.name", server.name, "it accepts full tensors alone.", DEFAULT.name)
    if backend not in ("naive", BACKEND):
        setting = f"{ROLLOUT}.checkpoint_engine.backend"
        return SettingError(setting, backend, "this backend sends full tensors.", "naive")
    if drafts and family in server.unknown_drafters:
        rule = f"how {server.title} cuts the drafter of a {family} is not known."
        return SettingError("actor_rollout_ref.model.mtp.enable_rollout", True, rule, "False")
    return server.obstacle(config, family)


def untested(config: Any) -> str:
    """Return why the layout of a rollout's server may have changed: its release was not tested with; else empty."""
    server = server_of(config)
    return versions.untested(server.name) if server.name in SERVERS else ""


def target_slices(tensor: TensorSpec, rollout: Rollout, worker: int, heads: Heads) -> list[TargetSlice]:
    """Return ``kept_slices`` by the rules of the rollout's server."""
    return kept_slices(tensor, server_named(rollout.server).families(), rollout, worker, heads)


def is_quantised(family: str, name: str, server: str = "") -> bool:
    """Whether a quantised rollout of this server and family quantises a weight."""
    names = server_named(server).quantised.get(family)
    return names is not None and names.search(name) is not None


def slices_of_scales(
    tensor: TensorSpec, slices: Iterable[TargetSlice], rollout: Rollout, family: str
) -> list[TargetSlice]:
    """Return ``scale_slices`` of a weight; none if the rollout does not quantise it."""
    if not rollout.is_quantised or not is_quantised(family, tensor.name, rollout.server):
        return []
    return scale_slices(tensor, slices, rollout)


def planned_layout(tensors: Iterable[TensorSpec], rollout: Rollout, worker: int, heads: Heads) -> dict[str, str]:
    """Return the entry of each parameter that a worker keeps (``layout_check.py``); raises like ``kept_slices``."""
    held: dict[str, tuple[tuple[int, ...], int]] = {}  # by parameter, the ends of its slices, and its first row
    for tensor in tensors:
        slices = target_slices(tensor, rollout, worker, heads)
        for part in (*slices, *slices_of_scales(tensor, slices, rollout, heads.family)):
            before, _ = held.get(part.parameter, (part.end, 0))
            first = part.block.low[0] if has_known_rows(tensor.name) else 0
            held[part.parameter] = tuple(map(max, part.end, before)), first
    return {RANK: rank_entry(worker % rollout.tp, rollout)} | {name: entry(*found) for name, found in held.items()}
