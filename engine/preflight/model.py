"""Facts of a model, checks that its experts can be sharded, and the settings of models without experts.

The model is built from its config on the meta device, which takes a second and no memory.

``engine.ep_size`` and the other settings of experts apply to roles whose model has experts. A role with a dense model
ignores them and logs one line. They are refused if no trained model has experts, because the user expects some.
"""

import contextlib
import copy
import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from ...rollout.servers import server_named
from ..checkpoint.safetensors_reader import HUB_ID, check_files, missing_weights, open_checkpoint
from ..compat import versions
from ..compat.transformers_names import no_init_weights
from ..config.settings import expert_settings
from ..config.values import ACTOR_MODEL, OPTIMIZERS, attention_of, overrides_of, plain
from ..errors import SettingError
from ..fsdp.fp32_modules import find_float32_modules, unmatched_patterns
from ..model.families import KNOWN_AS, NOT_CAUSAL
from ..model.meta import check_no_kernels, check_not_quantised
from ..moe.find import ExpertsInfo, UnsupportedModelError, check_etp, find_experts, is_dense
from ..moe.outside.families import prepare
from ..optim.settings import wants_muon
from ..topology.expert_placement import EtpDim, check_experts_divide, ep_fsdp_dim
from ..topology.mesh import Topology

__all__ = [
    "ModelFacts",
    "check_alone",
    "check_expert_shards",
    "check_model_path",
    "facts_of",
    "import_external",
    "inspect_model",
    "largest_sent",
    "not_applied",
    "without_experts",
]

logger = logging.getLogger("epfsdp2")

_REPLAY = "disabled"


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model on the meta device, for the checks.

    Args:
        name: name of its class.
        experts: number of experts of each experts module, in the model's order; empty for a dense model.
        stacked: distinct shapes ``[E, ...]`` of its stacked expert parameters, each with its ``ep`` dim and the dim
            that ``etp`` shards.
    """

    name: str
    experts: tuple[int, ...]
    stacked: tuple[tuple[tuple[int, ...], int, EtpDim | None], ...]
    model: Any = field(compare=False, repr=False)

    @property
    def is_dense(self) -> bool:
        return not self.experts


def check_model_path(model: Mapping[str, Any], setting: str = ACTOR_MODEL) -> str | None:
    """Return the folder with the model's config; None for a hub id outside the cache, or a remote path.

    Raises ``SettingError`` if the path is neither a folder nor a hub id, or the folder has no complete safetensors.
    """
    path, name = str(model.get("path")), f"{setting}.path"
    local = os.path.expanduser(path)
    try:
        if os.path.isdir(local):
            check_files(open_checkpoint(local))
            return local
        if "://" in path:
            return None
        if not HUB_ID.fullmatch(path):
            works = "an existing folder with config.json and *.safetensors"
            raise SettingError(name, path, "there is no such folder.", works)
        cached = try_to_load_from_cache(path, "config.json")
        if not isinstance(cached, str):
            return None
        folder = os.path.dirname(cached)
        if not missing_weights(path, folder):
            check_files(open_checkpoint(folder))
        return folder
    except SettingError as error:
        raise SettingError(name, path, error.rule, error.works) from None


def inspect_model(
    model: Mapping[str, Any],
    setting: str = ACTOR_MODEL,
    expert_plan: Mapping[str, int] | None = None,
    fp32_modules: Sequence[str] = (),
    built: nn.Module | None = None,
) -> ModelFacts | None:
    """Build the model on the meta device from its config, if it is not ``built``, and return its facts.

    Returns:
        None, with a warning, for a model that is not on this machine: a hub id outside the cache, or a remote path.

    Raises:
        SettingError: there is no such folder, it has no safetensors, or its config is wrong. Also for a model that is
            no causal language model, or whose experts are outside transformers' experts interface.
    """
    path = str(model.get("path"))
    folder = check_model_path(model, setting)
    if folder is None:
        logger.warning("epfsdp2: %s.path=%s is not on this machine yet, so it is not checked", setting, path)
        return None
    if built is None:
        built = _build(model, str(model.get("hf_config_path") or folder), setting)
    else:
        check_not_quantised(built.config, path, setting)  # type: ignore[arg-type]
    config: Any = built.config
    if fault := versions.fault_of_family(config.model_type):
        works = f"pip install '{fault.works}'"
        raise SettingError("transformers", versions.installed("transformers"), fault.reason, works)
    rule = NOT_CAUSAL.get(config.model_type, "")
    if rule:
        raise SettingError(f"{setting}.path", path, rule, "a causal language model, e.g. Gemma 4")
    try:
        # The plan, and patterns of routers, may belong to another role's model.
        dense = is_dense(built, expert_plan)
        experts = [] if dense else find_experts(built, expert_plan)
    except UnsupportedModelError as error:
        works = "a dense model, or one whose experts are on that interface, e.g. Qwen3-MoE, Mixtral, GLM-4.5 or gpt-oss"
        if "auto_map" in config.to_dict() and model.get("trust_remote_code"):
            works = "if transformers has a class of the family, a copy of the folder whose config.json has no auto_map"
        raise SettingError(f"{setting}.path", path, str(error), works) from None
    unmatched = unmatched_patterns(built, fp32_modules) if dense else ()
    patterns = [pattern for pattern in fp32_modules if pattern not in unmatched]
    find_float32_modules(built, [info.module for info in experts], patterns)
    return facts_of(built, experts)


def _build(model: Mapping[str, Any], config_path: str, setting: str) -> nn.Module:
    """Return the model on the meta device, from its config with the user's overrides."""
    import_external(model, setting)
    trust = bool(model.get("trust_remote_code", False))
    overrides = overrides_of(model)
    overrides.pop("attn_implementation", None)
    try:
        # As verl loads it, because transformers refuses some configs with some attention implementations.
        config = AutoConfig.from_pretrained(
            config_path, trust_remote_code=trust, attn_implementation=attention_of(model)
        )
        check_no_kernels(config, str(model.get("path")), setting)
        # Every class supports eager, with or without flash attention on this machine; facts_of reads the others.
        config._attn_implementation = "eager"
        _override(config, overrides, f"{setting}.override_config")
        check_not_quantised(config, str(model.get("path")), setting)
        # Parameters and buffers are on meta: a fused expert stack can be larger than the driver's memory.
        with torch.device("meta"), no_init_weights():
            built = _auto_class(config, trust).from_config(config, dtype=torch.float32, trust_remote_code=trust)
        prepare(built)
        return built
    except SettingError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, KeyError, ImportError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        rule = f"transformers can't build a model from its config: {type(error).__name__}: {reason}."
        works = f"a config.json of a causal language model; and look at {setting}.override_config"
        with contextlib.suppress(OSError):
            # transformers may not know the type.
            works = KNOWN_AS.get(str(PretrainedConfig.get_config_dict(config_path)[0].get("model_type")), works)
        raise SettingError(f"{setting}.path", model.get("path"), rule, works) from error


def import_external(model: Mapping[str, Any], setting: str) -> None:
    """Import ``external_lib``, as verl does in each worker: it may register model classes or blocks of experts."""
    named = plain(model.get("external_lib")) or []
    for name in [named] if isinstance(named, str) else named:
        try:
            importlib.import_module(name)
        except ImportError as error:
            rule = f"it can't be imported: {error}."
            raise SettingError(f"{setting}.external_lib", name, rule, "a module on PYTHONPATH of all nodes") from error


def _auto_class(config: PretrainedConfig, trust: bool) -> Any:
    # The choice of verl's get_hf_auto_model_class.
    remote = getattr(config, "auto_map", None) or {}
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if (trust and auto.__name__ in remote) or type(config) in auto._model_mapping:
            return auto
    return AutoModelForCausalLM


def facts_of(model: Any, experts: Sequence[ExpertsInfo]) -> ModelFacts:
    """Return the facts of a model on the meta device, which may have adapters."""
    stacked = {
        (tuple(info.module.get_parameter(name).shape), dim, info.etp_dims.get(name))
        for info in experts
        for name, dim in info.ep_dims.items()
    }
    counts = tuple(info.num_experts for info in experts)
    return ModelFacts(type(model).__name__, counts, tuple(sorted(stacked, key=str)), model)


def check_expert_shards(engine: Any, topology: Topology, facts: ModelFacts, optim: Any, setting: str) -> None:
    """Check that the mesh divides the experts, and that Muon gathers each matrix over one axis.

    ``ep`` divides the experts of every layer, ``etp`` their inner dims, and ``ep_fsdp`` the shard dim. ``optim`` is
    None for a role without an optimizer.

    Raises:
        SettingError: for a size, with those that divide, or for the optimizer.
    """
    check_experts_divide(facts.experts, topology, facts.name)
    shard_dim = engine.expert_shard_dim
    dims = [(shape, ep, ep_fsdp_dim(shape, topology, shard_dim, ep, etp)) for shape, ep, etp in facts.stacked]
    check_etp(find_experts(facts.model, engine.expert_plan), topology, facts.name)
    if topology.etp == 1 or topology.ep_fsdp == 1 or optim is None or not wants_muon(optim):
        return
    if any(len(shape) == 3 and dim != ep_dim for shape, ep_dim, dim in dims):
        name = f"{OPTIMIZERS.get(setting, 'optim')}.optimizer"
        rule = (
            f"gathers a matrix over one axis, and experts are cut over etp (engine.etp_size={topology.etp}) and "
            f"over ep_fsdp={topology.ep_fsdp} too (engine.expert_shard_dim={shard_dim})."
        )
        works = f"{name}=AdamW; or engine.expert_shard_dim=0 where ep_fsdp divides the experts of a rank"
        raise SettingError(name, "Muon", rule, works)


def largest_sent(model: Any, itemsizes: Mapping[str, int] | None = None, server: str = "") -> tuple[str, int]:
    """Return the name and the number of elements of the largest tensor that is sent to the rollout.

    Tensors are split as by ``Server.named``: a fused expert stack is one tensor, or one per expert. With ``itemsizes``,
    the bytes per element of each parameter as it is sent, bytes are compared and returned.
    """
    size_of = {name: 1 if itemsizes is None else itemsizes[name] for name, _ in model.named_parameters()}
    largest, named = ("", 0), server_named(server).named
    for name, param in sorted(model.named_parameters(), key=lambda item: -item[1].numel() * size_of[item[0]]):
        if param.numel() * size_of[name] <= largest[1]:
            break
        sent = ((n, t.numel() * size_of[name]) for n, t in named(model, [(name, param)], waiting={}))
        largest = max(largest, *sent, key=lambda item: item[1])
    return largest


def _override(config: Any, overrides: Mapping[str, Any], setting: str) -> None:
    """Set the overrides as verl does; warn of keys that the config has no field for."""
    for key, value in overrides.items():
        if isinstance(value, dict):
            _override(getattr(config, key), value, f"{setting}.{key}")
            continue
        if not hasattr(config, key):
            kind = type(config).__name__
            logger.warning("epfsdp2: %s.%s changes nothing, because %s has no such field", setting, key, kind)
        setattr(config, key, value)


def without_experts(engine: Any, model: nn.Module) -> Any:
    """Copy the engine's settings for a dense model, with the settings of experts at their defaults.

    Patterns of ``fp32_modules`` that match no module of the model (routers) are removed.
    """
    own, replay = copy.copy(engine), copy.copy(engine.router_replay)
    vars(replay)["mode"] = _REPLAY
    unmatched = unmatched_patterns(model, engine.fp32_modules)
    patterns = [pattern for pattern in engine.fp32_modules if pattern not in unmatched]
    vars(own).update(expert_settings(), fp32_modules=patterns, router_replay=replay)
    return own


def not_applied(engine: Any, path: str, model: nn.Module) -> str:
    """Format one line about the settings that do not apply to a model without experts; empty if none is set."""
    given = _given(engine)
    if unmatched := unmatched_patterns(model, engine.fp32_modules):
        given["engine.fp32_modules"] = unmatched
    if not given:
        return ""
    said = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"{path} has no experts: {said} {'do' if len(given) > 1 else 'does'} not apply, FSDP2 over all ranks"


def check_alone(engine: Any, facts: ModelFacts, setting: str, critic: Mapping[str, Any] | None = None) -> None:
    """Refuse settings of experts where neither this dense model nor the run's critic, if it has one, has experts.

    Raises:
        SettingError: for the first such setting or unmatched pattern, if the critic has no experts either.
    """
    given = _given(engine)
    if not given and not unmatched_patterns(facts.model, engine.fp32_modules):
        return
    others = ""
    if critic is not None:
        beside = inspect_model(critic, "critic.model", engine.expert_plan)
        if beside is None or not beside.is_dense:
            return
        others = f", nor has that of the critic, {beside.name}"
    if engine.expert_plan:
        find_experts(facts.model, engine.expert_plan)  # raises with the parameters that its patterns may mean
    find_float32_modules(facts.model, [], engine.fp32_modules)
    name, value = next(iter(given.items()))
    rule = f"concerns experts, and {facts.name} ({setting}.path) is a dense model: it has none{others}."
    default = _REPLAY if name.endswith("mode") else expert_settings()[name.removeprefix("engine.")]
    raise SettingError(name, value, rule, f"{name}={default}, or leave it out: FSDP2 over all ranks")


def _given(engine: Any) -> dict[str, Any]:
    """Return the settings of experts that differ from their default, by full name."""
    values = {f"engine.{name}": (getattr(engine, name), default) for name, default in expert_settings().items()}
    values["engine.router_replay.mode"] = engine.router_replay.mode, _REPLAY
    return {name: value for name, (value, default) in values.items() if value not in (default, {})}
