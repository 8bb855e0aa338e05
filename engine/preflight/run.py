"""All checks of a run, before a worker starts.

``check_run`` runs on the driver, before Ray starts. ``check_training`` is the part without a rollout; ``sft_trainer``,
which has no driver, runs it on each rank before weights are read.

``model.py`` inspects the model. ``features.py`` has the checks of single features, ``rollout.py`` the rollout's, and
``resume.py`` those of checkpoints.
"""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...rollout.bitwise.settings import check_bitwise
from ...rollout.servers import SERVERS, server_of
from ..compat import versions
from ..config.settings import param_dtype
from ..config.values import ACTOR_MODEL, OPTIMIZERS, get_setting
from ..errors import SettingError
from ..moe.find import find_experts
from ..moe.gemm.backends import choose_backend
from ..moe.overlap import check_overlap
from ..optim.settings import check_optimizer
from ..topology.mesh import Topology
from . import features
from .model import ModelFacts, check_alone, check_expert_shards, inspect_model, without_experts
from .mtp import check_drafter, check_mtp
from .resume import check_checkpoint, check_resume
from .rollout import (
    check_adapters_alone,
    check_algorithm,
    check_distillation,
    check_positions,
    check_recorded_keys,
    check_rollout,
    check_rounding,
    check_routes,
    check_sync,
)

__all__ = ["check_model_settings", "check_run", "check_training", "check_versions"]

logger = logging.getLogger("epfsdp2")

# verl's model settings that this engine does not support.
_UNSUPPORTED = ("use_liger", "tiled_mlp.enabled")


def check_run(
    engine: Any,
    n_gpus: int,
    model: Mapping[str, Any],
    rollout: Mapping[str, Any],
    *,
    checkpoint: Mapping[str, Any] | None = None,
    optim: Any = None,
    device: str = "cuda",
    ipc: bool = True,
) -> None:
    """Run all checks for a run of verl's RL trainer.

    Args:
        engine: the engine's settings (``EPFSDP2EngineConfig`` or anything with its fields).
        n_gpus: ranks of the trainer.
        rollout: ``n_gpus_per_node``, ``backend``, ``update_weights_bucket_megabytes``, and under their own names
            verl's rollout settings that place it (``rollout/servers.py`` reads them); ``resume`` is for
            ``check_resume``, with the critic's ``load_contents`` as ``critic_contents``.
        checkpoint, optim: the actor's settings.
        device: verl's device name; ``cpu`` without an accelerator.
        ipc: whether weights reach the rollout through device memory, else through /dev/shm.

    Raises:
        SettingError: for the first setting that can't work.
    """
    check_versions(rollout.get("name"))
    check_algorithm(rollout)
    check_recorded_keys(engine, rollout)
    check_routes(engine, rollout)
    facts = check_training(engine, n_gpus, model, checkpoint=checkpoint, optim=optim, device=device)
    check_bitwise(engine, model, rollout, None if facts is None else facts.model, device, param_dtype(engine))
    needs_critic = rollout.get("critic_enable")
    if needs_critic is None:  # as verl's need_critic
        needs_critic = rollout.get("adv_estimator") == "gae"
    critic = {"path": rollout["critic_path"]} if needs_critic and rollout.get("critic_path") else None
    resume = rollout.get("resume") or {}
    check_resume(resume, "actor", (checkpoint or {}).get("load_contents") or (), ACTOR_MODEL)
    if critic is not None:
        check_resume(resume, "critic", resume.get("critic_contents") or (), "critic.model")
    if facts is not None and facts.is_dense:
        check_alone(engine, facts, ACTOR_MODEL, critic)
    features.check_replay(engine, model, facts)
    features.check_indexer_replay(engine, model, None if facts is None else facts.model)
    if facts is not None and facts.is_dense:
        engine = without_experts(engine, facts.model)
    check_adapters_alone(model, rollout, facts, device)
    check_distillation(engine, model, rollout)
    check_mtp(engine, model, None if facts is None else facts.model)
    check_drafter(model, rollout)
    features.check_images(engine, model, rollout, facts)
    colocated = (rollout.get("backend") or "naive") == "naive"
    if rollout.get("name"):
        check_sync(engine, n_gpus, rollout, facts, device, colocated=colocated)
    check_positions(rollout, facts)
    check_rounding(engine, rollout, facts)
    if rollout.get("name") and server_of(rollout).shares_memory and not ipc:
        check_rollout(engine, n_gpus if colocated else 0, rollout, facts)


def check_training(
    engine: Any,
    world: int,
    model: Mapping[str, Any],
    *,
    checkpoint: Mapping[str, Any] | None = None,
    optim: Any = None,
    device: str = "cuda",
    setting: str = ACTOR_MODEL,
    built: nn.Module | None = None,
) -> ModelFacts | None:
    """Check a role's settings without a rollout; return facts of its model, None if that is not on this machine yet.

    Args:
        world: number of ranks.
        optim: None for a role without an optimizer.
        setting: config path of the model's node: ``model`` in ``sft_trainer``.
        built: the model on the meta device, if it is already built; it may get adapters.

    Raises:
        SettingError: for the first setting that can't work.
    """
    check_model_settings(model, setting)
    features.check_activation_offload(engine, model, setting)
    check_checkpoint(checkpoint or {}, setting, engine.save_frozen_base)
    facts = inspect_model(model, setting, engine.expert_plan, engine.fp32_modules, built)
    facts = features.with_value_head(model, facts, setting)
    if facts is not None and facts.is_dense:
        engine = without_experts(engine, facts.model)
    topology = Topology.arrange(world, engine.ep_size, engine.fsdp_size, engine.etp_size)
    features.check_batch_invariant(engine, model, device, setting)
    choose_backend(engine.experts_backend, device, param_dtype(engine), engine.batch_invariant)
    features.check_casts(engine, topology)
    if facts is not None:
        check_expert_shards(engine, topology, facts, optim, setting)
        features.check_routers(engine, facts)
        experts = find_experts(facts.model, engine.expert_plan)
        check_overlap(engine.dispatch_chunks, engine.overlap_shared_experts, engine.dispatcher, facts.model, experts)
        features.check_dispatcher(engine, facts, device)
        features.check_tower(engine, facts)
    features.check_attention(model, facts, device=device, setting=setting)
    features.check_fused_kernels(model, facts, device=device, setting=setting)
    features.check_lora(engine, topology, model, facts, optim, setting)
    features.check_rounding_alone(engine, topology, model, facts, setting)
    features.check_sequence_parallel(engine.ulysses_sequence_parallel_size, world, model, facts, setting=setting)
    features.check_packing(model, facts, setting)
    if optim is not None:
        check_optimizer(optim, OPTIMIZERS.get(setting, "optim"), device)
    return facts


def check_model_settings(model: Any, setting: str = ACTOR_MODEL) -> None:
    """Refuse verl's model settings (a mapping or ``HFModelConfig``) that this engine would silently ignore."""
    for key in _UNSUPPORTED:
        name = f"{setting}.{key}"
        if value := get_setting(model, key):
            raise SettingError(name, value, "is not supported by this engine.", f"{name}=False")


def check_versions(rollout_name: str | None) -> None:
    """Refuse a distribution that is missing or known to break; say in one line what was not tested.

    Raises:
        SettingError: for the first such distribution.
    """
    rollout = [rollout_name] if rollout_name in SERVERS else []
    found = {name: versions.installed(name) for name in ("verl", "ray", "torch", "transformers", *rollout)}
    for name in (name for name, version in found.items() if version is None):
        if name in SERVERS:
            rule, works = f"{SERVERS[name].title} is not installed.", SERVERS[name].install_hint
            raise SettingError("actor_rollout_ref.rollout.name", name, rule, works)
        raise SettingError(name, None, f"{name} is not installed.", f"pip install '{name}>={versions.OLDEST[name]}'")
    for name, rule, works in versions.faults(found):
        raise SettingError(name, found[name], rule, f"pip install '{works}'")
    if doubts := versions.doubts(found):
        if any(map(versions.untested, rollout)):
            doubts.append("the first weight sync compares layouts and checksums")
        logger.warning("epfsdp2: %s", "; ".join(doubts))
