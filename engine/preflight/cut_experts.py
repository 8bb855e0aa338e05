"""Checks that experts can be sharded over ``ep``, ``ep_fsdp`` and ``etp``, and combined with Muon and delta syncs."""

from collections.abc import Mapping
from typing import Any

from ..config.values import CHECKPOINT_BACKEND, OPTIMIZERS
from ..errors import SettingError
from ..moe.find import check_etp, find_experts
from ..optim.settings import wants_muon
from ..topology.expert_placement import check_experts_divide, ep_fsdp_dim
from ..topology.mesh import Topology
from .model_facts import ModelFacts

__all__ = ["check_cut_experts", "check_cut_experts_sync", "check_experts"]


def check_experts(topology: Topology, facts: ModelFacts, shard_dim: int | str = "auto") -> None:
    """Check that ``ep_size`` divides the experts of every layer, and ``ep_fsdp`` the shard dim of the rest.

    Args:
        shard_dim: ``engine.expert_shard_dim``.

    Raises:
        SettingError: lists values that also divide the number of ranks.
    """
    check_experts_divide(facts.experts, topology, facts.name)
    for shape, ep_dim, etp_dim in facts.stacked:
        ep_fsdp_dim(shape, topology, shard_dim, ep_dim, etp_dim)


def check_cut_experts(engine: Any, topology: Topology, facts: ModelFacts, optim: Any, setting: str) -> None:
    """Check that ``etp`` divides the inner dims, and that Muon gathers each matrix over one axis only.

    Args:
        optim: optimizer settings; None for a role without an optimizer.
        setting: config path of the model's node.

    Raises:
        SettingError: for the size, or for the optimizer.
    """
    check_etp(find_experts(facts.model, engine.expert_plan), topology, facts.name)
    if topology.etp == 1 or topology.ep_fsdp == 1 or optim is None or not wants_muon(optim):
        return
    shard_dim, name = engine.expert_shard_dim, f"{OPTIMIZERS.get(setting, 'optim')}.optimizer"
    for shape, ep_dim, etp_dim in facts.stacked:
        if len(shape) == 3 and ep_fsdp_dim(shape, topology, shard_dim, ep_dim, etp_dim) != ep_dim:
            raise SettingError(
                name,
                "Muon",
                f"gathers a matrix over one axis, and experts are cut over etp (engine.etp_size={topology.etp}) and "
                f"over ep_fsdp={topology.ep_fsdp} too (engine.expert_shard_dim={shard_dim}).",
                f"{name}=AdamW; or engine.expert_shard_dim=0 where ep_fsdp divides the experts of a rank",
            )


def check_cut_experts_sync(engine: Any, rollout: Mapping[str, Any]) -> None:
    """Refuse verl's delta syncs with ``etp``: they expect a shard to be one block, and a shard of gate and up is two.

    Raises:
        SettingError: for the backend.
    """
    if engine.etp_size > 1 and rollout.get("backend") == "delta_sharded":
        rule = f"takes a shard to be one block, and with engine.etp_size={engine.etp_size} that of gate and up is two."
        raise SettingError(
            CHECKPOINT_BACKEND, "delta_sharded", rule, f"{CHECKPOINT_BACKEND}=naive, or engine.etp_size=1"
        )
