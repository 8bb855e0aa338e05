"""Checks of LoRA adapters: whether they can be trained, and served by the rollout."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...rollout.servers import BACKEND, server_of
from ..config.values import ACTOR_MODEL, CHECKPOINT_BACKEND, get_setting
from ..errors import SettingError
from ..lora.adapters import Lora, lora_of
from ..lora.peft_files import check_dora, read_adapter
from ..lora.rollout_names import has_form
from ..lora.settings import LoraSettings
from ..model.value_head import as_critic, value_head
from ..moe.find import find_experts
from ..moe.gemm.backends import REGISTERED
from ..topology.mesh import Topology
from .cut_experts import check_cut_experts, check_experts
from .model_facts import ModelFacts, facts_of

__all__ = ["check_adapters_alone", "check_lora", "with_value_head"]

logger = logging.getLogger("epfsdp2")

_CRITIC = "critic.model"


def with_value_head(model: Any, facts: ModelFacts | None, setting: str) -> ModelFacts | None:
    """Return a critic's facts with the value head that its worker trains beside adapters; other facts unchanged."""
    if facts is None or setting != _CRITIC or LoraSettings.of(model, setting) is None:
        return facts
    return replace(facts, model=as_critic(facts.model))


def check_lora(
    engine: Any,
    topology: Topology,
    model: Any,
    facts: ModelFacts | None,
    optim: Any = None,
    setting: str = ACTOR_MODEL,
) -> None:
    """Check that adapters match weights of the model, and that they can be sharded and trained.

    Args:
        facts: None for a model that is not on this machine; then only settings are checked. ``facts.model`` gets the
            adapters; a critic's has its value head (``with_value_head``).

    Raises:
        SettingError: for the first setting that can't work.
    """
    megatron = get_setting(model, "lora")
    if megatron and megatron.get("rank"):
        rule = "is verl's setting for Megatron."
        raise SettingError(f"{setting}.lora.rank", megatron["rank"], rule, f"{setting}.lora_rank={megatron['rank']}")
    settings = LoraSettings.of(model, setting)
    if settings is None:
        return
    if facts is None:
        return
    if setting == _CRITIC:
        settings = replace(settings, value_head=value_head(facts.model.config))
    lora = Lora(facts.model, settings, engine.expert_plan)
    on_experts = [name for name, target in lora.targets.items() if target.experts is not None]
    if on_experts and engine.experts_backend.startswith(REGISTERED):
        rule = f"adds no adapter, and {on_experts[0]} gets one."
        raise SettingError("engine.experts_backend", engine.experts_backend, rule, "engine.experts_backend=auto")
    if settings.adapter is not None:
        read_adapter(settings.adapter, lora, f"{setting}.lora_adapter_path")
    check_dora(lora, setting)
    _check_saved(engine, model, lora, facts, setting)
    adapted = facts_of(facts.model, find_experts(facts.model, engine.expert_plan) if lora.has_experts else [])
    check_experts(topology, adapted, engine.expert_shard_dim)
    check_cut_experts(engine, topology, adapted, optim, setting)


def _check_saved(engine: Any, model: Any, lora: Lora, facts: ModelFacts, setting: str) -> None:
    """Check ``modules_to_save``: each module's forward uses copies of its weights, so nothing else may read them.

    Raises:
        SettingError: fused kernels or torch.compile would read the frozen weights.
    """
    saved = {name.rpartition(".")[0] for name in lora.saved}
    name, value = f"{setting}.lora.modules_to_save", list(lora.settings.modules_to_save)
    head = facts.model.get_output_embeddings()
    if get_setting(model, "use_fused_kernels") and any(facts.model.get_submodule(fqn) is head for fqn in saved):
        rule = "verl's fused kernels read the head's weight, and not the copy that is trained."
        raise SettingError(name, value, rule, f"{setting}.use_fused_kernels=False, or modules without the head")
    if saved and engine.compile_dense:
        rule = "its modules exchange their weights in a forward, which torch.compile does not follow."
        raise SettingError(name, value, rule, "engine.compile_dense=False")


def check_adapters_alone(model: Any, rollout: Mapping[str, Any], facts: ModelFacts | None, device: str) -> None:
    """Check adapters that are sent to the rollout without the base weights (``lora.merge=False``).

    verl's own checkpoint engines send merged weights all the same. With them any adapter can be trained.

    Args:
        facts: None for a model that is not on this machine; ``facts.model`` has the adapters (``check_lora``).
    """
    if not model.get("lora_rank") or not rollout.get("name") or (model.get("lora") or {}).get("merge"):
        return
    setting, works = f"{ACTOR_MODEL}.lora.merge", f"{ACTOR_MODEL}.lora.merge=True"
    server = server_of(rollout)
    if not server.serves_adapters:
        rule = f"{server.name} is sent adapters merged into the weights, and in no other way."
        raise SettingError(setting, False, rule, works)
    settings = LoraSettings.of(model, ACTOR_MODEL)
    backend = rollout.get("backend") or "naive"
    is_merged = backend not in ("naive", BACKEND)
    if is_merged:
        logger.warning(
            "epfsdp2: %s=%s sends all weights in every sync, with adapters merged into them; %s sends adapters alone",
            CHECKPOINT_BACKEND,
            backend,
            BACKEND,
        )
    unserved = [name for name in server.lacking if getattr(settings, name)]
    if unserved and not is_merged:
        rule = f"{server.title} serves no adapter with {unserved[0]}."
        raise SettingError(setting, False, rule, works)
    if facts is None or facts.is_dense:
        return
    lora = lora_of(facts.model)
    adapted = [name for name, target in lora.targets.items() if target.experts is not None] if lora is not None else []
    some = model.get("target_modules")
    if device in server.no_expert_adapters and (adapted or not some or isinstance(some, str)):
        what = f"{adapted[0]} gets one" if adapted else "it prepares them unless target_modules is a list"
        rule = f"{server.title}'s {device.upper()} build has no kernels for adapters of experts, and {what}."
        works += f", or {ACTOR_MODEL}.target_modules=[q_proj,k_proj,v_proj,o_proj]"
        raise SettingError(setting, False, rule, works)
    unknown = [name for name in adapted if not has_form(facts.model, name, server.stacked_adapters)]
    if unknown and not is_merged:
        rule = f"it is not known in which form {server.title} takes adapters of {unknown[0]} of {facts.name}."
        raise SettingError(setting, False, rule, works)
