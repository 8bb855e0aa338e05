"""All checks of a run, before a worker starts.

``check_run`` runs on the driver, before Ray starts. ``check_training`` is the part without a rollout; ``sft_trainer``,
which has no driver, runs it on each rank before weights are read. The model is built from its ``config.json`` on the
meta device, which takes a second and no memory.

``features.py`` has the checks of single features, ``rollout.py`` the rollout's.
"""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...rollout.servers import SERVERS, server_of
from ..checkpoint.state import KNOWN_CONTENTS
from ..compat import versions
from ..config.settings import param_dtype
from ..config.values import ACTOR_MODEL, OPTIMIZERS, get_setting, plain
from ..errors import SettingError
from ..moe.find import find_experts
from ..moe.gemm.backends import choose_backend
from ..moe.overlap import check_overlap
from ..optim.settings import check_optimizer
from ..topology.mesh import Topology
from .adapters import check_adapters_alone, check_lora, with_value_head
from .cut_experts import check_cut_experts, check_cut_experts_sync, check_experts
from .dense_models import check_alone, without_experts
from .features import (
    check_activation_offload,
    check_attention,
    check_casts,
    check_dispatcher,
    check_distillation,
    check_fused_kernels,
    check_images,
    check_packing,
    check_replay,
    check_routers,
    check_routes,
    check_sequence_parallel,
    check_tower,
)
from .model_facts import ModelFacts, inspect_model
from .positions import check_positions
from .resume import check_resume
from .rollout import check_rollout, check_sync
from .rounding import check_rounding, check_rounding_alone

__all__ = [
    "check_checkpoint",
    "check_experts",
    "check_model_settings",
    "check_run",
    "check_training",
    "check_versions",
]

logger = logging.getLogger("epfsdp2")

# Config paths of the checkpoint's node, by the model's.
_CHECKPOINTS = {
    ACTOR_MODEL: "actor_rollout_ref.actor.checkpoint",
    "critic.model": "critic.checkpoint",
    "model": "checkpoint",
}
# verl's model settings that this engine does not support, and their value when off.
_UNSUPPORTED = {
    "use_liger": False,
    "tiled_mlp.enabled": False,
    "mtp.enable": False,
}


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
        model: verl's model settings.
        rollout: ``n_gpus_per_node``, ``backend``, ``update_weights_bucket_megabytes``, and under their own names
            verl's rollout settings that place it (``rollout/servers.py`` reads them); ``resume`` is for
            ``check_resume``, with the critic's ``load_contents`` as ``critic_contents``.
        checkpoint: the actor's checkpoint settings.
        optim: the actor's optimizer settings.
        device: verl's device name; ``cpu`` without an accelerator.
        ipc: whether weights reach the rollout through device memory, else through /dev/shm.

    Raises:
        SettingError: for the first setting that can't work.
    """
    check_versions(rollout.get("name"))
    check_routes(engine, rollout)
    facts = check_training(engine, n_gpus, model, checkpoint=checkpoint, optim=optim, device=device)
    _check_resume(rollout, checkpoint or {})
    if facts is not None and facts.is_dense:
        check_alone(engine, facts, ACTOR_MODEL, _critic_of(rollout))
    check_replay(engine, model, facts)
    if facts is not None and facts.is_dense:
        engine = without_experts(engine, facts.model)
    check_cut_experts_sync(engine, rollout)
    check_adapters_alone(model, rollout, facts, device)
    check_distillation(engine, model, rollout)
    check_images(rollout, facts)
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
    """Check the settings of the engine and the model, without a rollout.

    Args:
        world: number of ranks.
        checkpoint: the role's checkpoint settings.
        optim: the role's optimizer settings; None for a role without an optimizer.
        setting: config path of the model's node: ``model`` in ``sft_trainer``.
        built: the model on the meta device, if it is already built; it may get adapters.

    Returns:
        Facts of the model; None if it is not on this machine yet.

    Raises:
        SettingError: for the first setting that can't work.
    """
    check_model_settings(model, setting)
    check_activation_offload(engine, model, setting)
    check_checkpoint(checkpoint or {}, _CHECKPOINTS.get(setting, "checkpoint"))
    facts = inspect_model(model, setting, engine.expert_plan, engine.fp32_modules, built)
    facts = with_value_head(model, facts, setting)
    if facts is not None and facts.is_dense:
        engine = without_experts(engine, facts.model)
    topology = Topology.arrange(world, engine.ep_size, engine.fsdp_size, engine.etp_size)
    choose_backend(engine.experts_backend, device, param_dtype(engine))
    check_casts(engine, topology)
    if facts is not None:
        check_experts(topology, facts, engine.expert_shard_dim)
        check_cut_experts(engine, topology, facts, optim, setting)
        check_routers(engine, model, facts)
        experts = find_experts(facts.model, engine.expert_plan)
        check_overlap(engine.dispatch_chunks, engine.overlap_shared_experts, engine.dispatcher, facts.model, experts)
        check_dispatcher(engine, facts, device)
        check_tower(engine, facts)
    check_attention(model, facts, device=device, setting=setting)
    check_fused_kernels(model, facts, device=device, setting=setting)
    check_lora(engine, topology, model, facts, optim, setting)
    check_rounding_alone(engine, topology, model, facts, setting)
    check_sequence_parallel(engine.ulysses_sequence_parallel_size, world, model, facts, setting=setting)
    check_packing(model, facts, setting)
    if optim is not None:
        check_optimizer(optim, OPTIMIZERS.get(setting, "optim"), device)
    return facts


def _check_resume(rollout: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> None:
    resume = rollout.get("resume") or {}
    check_resume(resume, "actor", checkpoint.get("load_contents") or (), _CHECKPOINTS[ACTOR_MODEL])
    if _critic_of(rollout) is not None:
        check_resume(resume, "critic", resume.get("critic_contents") or (), _CHECKPOINTS["critic.model"])


def _critic_of(rollout: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the model settings of the run's critic; None if it has none (verl's ``need_critic``)."""
    wanted = rollout.get("critic_enable")
    wanted = rollout.get("adv_estimator") == "gae" if wanted is None else wanted
    return {"path": rollout["critic_path"]} if wanted and rollout.get("critic_path") else None


def check_model_settings(model: Any, setting: str = ACTOR_MODEL) -> None:
    """Refuse verl's model settings that this engine would silently ignore.

    Args:
        model: verl's model settings, as a mapping or as ``HFModelConfig``.
        setting: config path of their node.

    Raises:
        SettingError: for the first of them.
    """
    for name, off in _UNSUPPORTED.items():
        value = get_setting(model, name)
        if value:
            raise SettingError(
                f"{setting}.{name}", value, "is not supported by this engine.", f"{setting}.{name}={off}"
            )


def check_checkpoint(checkpoint: Mapping[str, Any], setting: str) -> None:
    """Check that the contents to save and load exist, and that a critic does not save in the background.

    Raises:
        SettingError: lists the known contents.
    """
    for key in ("save_contents", "load_contents"):
        contents = plain(checkpoint.get(key) or ())
        wanted = {contents} if isinstance(contents, str) else set(contents)
        unknown = sorted(str(entry) for entry in wanted - KNOWN_CONTENTS)
        if unknown:
            known = ",".join(sorted(KNOWN_CONTENTS))
            raise SettingError(
                f"{setting}.{key}",
                contents,
                f"there is no {' and no '.join(unknown)} in a checkpoint.",
                f"{setting}.{key}=[{known}], or some of them",
            )
        if isinstance(contents, str):
            raise SettingError(f"{setting}.{key}", contents, "is a list.", f"{setting}.{key}=[{contents}]")
    if checkpoint.get("async_save") and setting == _CHECKPOINTS["critic.model"]:
        rule = "a step is complete, and named the latest, when the actor's part is; the critic's has to be there then."
        raise SettingError(f"{setting}.async_save", True, rule, f"{setting}.async_save=False")


def check_versions(rollout_name: str | None) -> None:
    """Refuse a distribution that is missing or outside the accepted range; warn of an untested version.

    Raises:
        SettingError: for the first such distribution.
    """
    rollout = [rollout_name] if rollout_name in SERVERS else []
    for name in ("verl", "ray", "torch", "transformers", *rollout):
        version, accepted = versions.installed(name), versions.accepted()[name]
        if version is None and name in SERVERS:
            rule, works = f"{SERVERS[name].title} is not installed.", SERVERS[name].install_hint
            raise SettingError("actor_rollout_ref.rollout.name", name, rule, works)
        if version is None:
            raise SettingError(name, None, f"{name} is not installed.", f"pip install '{name}{accepted}'")
        if not versions.is_accepted(name, version):
            shown = ", ".join(versions.tested(name))
            rule = f"this version of {name} is outside {accepted}, the range that epfsdp2 works with (tested: {shown})."
            raise SettingError(name, version, rule, f"pip install '{name}{accepted}'")
        if warning := versions.untested(name):
            logger.warning("epfsdp2: %s", warning)
