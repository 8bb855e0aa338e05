"""vLLM's description for the trainer: settings that slices support, and settings that vLLM refuses or miscomputes."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch import nn

from ...engine.compat import versions
from ...engine.errors import SettingError, close_matches
from ...engine.topology.mesh import divisors
from ..layout.rollout_config import BACKEND, BLOCK, ROLLOUT, server_arguments, size_of
from ..layout.server import Server, disaggregated
from ..layout.specs import Channels, Rollout, SyncMode, Tower
from . import layout
from .layout import FP8_FAMILIES, check_sizes
from .names import ADAPTED_AS_STACKS, for_vllm

__all__ = ["EXTENSION", "VLLM", "check_graphs", "check_parallelism", "has_our_extension"]

EXTENSION = "epfsdp2.rollout.vllm_worker.WeightSyncExtension"
_VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
_OVERRIDES = f"{_VLLM}.hf_overrides.quantization_config"
_COMPRESSED = "compressed-tensors"
_BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
_TP, _EP = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.expert_parallel_size"
# From here on mla_attention.py copies into W_UV and W_UK_T (replace_parameter, vllm#48251); in 0.24 it assigns them.
_KEEPS_LATENT_MATRICES = ">=0.27.1"
# Keys of unquantised layers in the configs of vLLM's quantisations, and vLLM's names of fused layers.
_IGNORED = ("ignored_layers", "modules_to_not_convert", "ignore")
_FUSED = ("qkv_proj", "gate_up_proj")


class _Vllm(Server):
    install_hint = "pip install 'epfsdp2[gpu]', or on a machine without a GPU 'epfsdp2[cpu]'"
    quantised: Mapping[str, re.Pattern[str]] = FP8_FAMILIES
    stacked_adapters = ADAPTED_AS_STACKS
    # 0.27, lora/peft_helper.py: one factor scales all of an adapter.
    lacking = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern")
    no_expert_adapters = ("cpu",)
    unknown_drafters = frozenset({"deepseek_v4"})
    serves_adapters = shares_memory = is_as_fast_in_full = has_known_drafters = writes_times_of_frames = True

    families = staticmethod(layout.families)
    known_families = staticmethod(layout.known_families)
    named = staticmethod(for_vllm)

    def rollout_of(self, config: Any) -> Rollout:
        block = BLOCK if config.get("quantization") == "fp8" else 0
        channels = _compressed_kind(None if block else _overridden(config).get("quantization_config"))[0]
        return replace(super().rollout_of(config), tower=_tower(_arguments(config)), block=block, channels=channels)

    def quantisation_settings(self, config: Any) -> list[tuple[str, object]]:
        found = super().quantisation_settings(config)
        found += [(f"{_VLLM}.quantization", _arguments(config).get("quantization"))]
        found += [(_OVERRIDES, _overridden(config).get("quantization_config"))]
        return [(setting, value) for setting, value in found if value]

    def obstacle(self, config: Any, family: str | None) -> SettingError | None:
        vllm, pipeline = _arguments(config), size_of(config, "pipeline_model_parallel_size")
        if not has_our_extension(config):
            reason = "only this package's extension can load slices."
            return SettingError(f"{_VLLM}.worker_extension_cls", vllm.get("worker_extension_cls"), reason, EXTENSION)
        if pipeline > 1:
            reason = "transfer plans do not support pipeline-parallel rollouts."
            return SettingError(f"{ROLLOUT}.pipeline_model_parallel_size", pipeline, reason, "1")
        if found := disaggregated(config):
            return found
        for setting, value in self.quantisation_settings(config):
            kind, reason = _compressed_kind(value)
            is_known = (setting, value) == (f"{ROLLOUT}.quantization", "fp8") or (setting == _OVERRIDES and kind)
            if is_known and family is not None and family not in FP8_FAMILIES:
                known = ", ".join(sorted(FP8_FAMILIES))
                reason, is_known = f"which weights of a {family} vLLM quantises is not known (known: {known}).", False
            if not is_known:
                return SettingError(setting, value, reason, "null")
        placement = vllm.get("expert_placement_strategy") or "linear"
        if placement != "linear":
            reason = "transfer plans assume that experts are placed in linear order."
            return SettingError(f"{_VLLM}.expert_placement_strategy", placement, reason, "linear")
        return self.unknown_family(family, "is not known here")

    def check_settings(self, config: Any, model: nn.Module | None, requested: str, ranks: int, device: str) -> None:
        if model is None:
            return check_parallelism(config, ranks, None)
        own: Any = model.config
        check_graphs(config, own, device)
        _check_family(own, config, requested)
        check_parallelism(config, ranks, own.get_text_config())
        _check_ignored(dict(self.quantisation_settings(config)).get(_OVERRIDES), model)

    def check_mode(self, config: Any, mode: SyncMode, reason: str, backend: str) -> None:
        quantised = self.quantisation_settings(config)
        if mode == "full" and quantised and backend != "naive":
            setting, value = quantised[0]
            rule = f"vLLM's quantising loader takes checkpoints' names, and {_BACKEND}={backend} carries others."
            if backend == "delta_sharded":
                rule = f"{_BACKEND}={backend} sends changed elements alone, and scales are of all elements of a block."
            elif backend == BACKEND and reason:
                rule += f" No slices are sent: {reason}"
            raise SettingError(setting, value, rule, f"{_BACKEND}=naive, or {setting}=null")
        compressed = dict(quantised).get(_OVERRIDES)
        if mode == "full" and isinstance(compressed, Mapping) and compressed.get("quant_method") == _COMPRESSED:
            why = _compressed_kind(compressed)[1] or reason or "its values and scales are sent in slices alone."
            rule = f"vLLM quantises nothing for {_COMPRESSED}, and full tensors have no scales: {why}"
            raise SettingError(_OVERRIDES, compressed, rule, f"{ROLLOUT}.quantization=fp8")

    def longest_start(self, config: Any) -> Any:
        # 0 stands for the model's max_position_embeddings, verl 0.9.1's choice for null.
        own = _arguments(config).get("max_model_len")
        return (config.get("max_model_len") if own is None else own) or 0

    def check_rotations(self, kind: str, parameters: Mapping[str, Any], most: int, config: Any) -> int:
        # vLLM 0.24 to 0.33 chooses longrope's frequencies once, by this, and never changes those of dynamic NTK.
        limit = self.longest_start(config)
        if not isinstance(limit, int) or not 0 <= limit <= most:
            rule = f"frequencies of {kind} depend on it, so it has to be a number, and vLLM has {most} positions."
            raise SettingError(f"{_VLLM}.max_model_len", limit, rule, f"{ROLLOUT}.max_model_len={most}, or less")
        return limit or most


VLLM = _Vllm("vllm", "vLLM")


def _compressed_kind(config: Any) -> tuple[Channels, str]:
    """Return the format of vLLM's ``quantization_config``, or "" and the reason why slices can't serve it."""
    if isinstance(config, str) and "_per_" in config:  # of vLLM's own
        return "", "each worker quantises its fused and cut parameters, which are in bfloat16 until then."
    if not isinstance(config, Mapping) or config.get("quant_method") != _COMPRESSED:
        return "", "vLLM quantises the weights and needs full tensors for that."
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or list(groups[0].get("targets") or ()) != ["Linear"]:
        return "", "ranks quantise all linears in one way, so it needs one group, of targets [Linear]."
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    if weights.get("strategy") == "tensor":
        return "", "vLLM's workers quantise fused weights with one scale for each tensor anew, by their own largest."
    kind = {"float": "fp8", "int": "int8"}.get(weights.get("type", "int"), "")
    if weights.get("num_bits") != 8 or weights.get("strategy") != "channel" or not weights.get("symmetric", True):
        return "", "ranks quantise to 8 bits with one scale for each row (strategy channel), around zero."
    if not inputs.get("dynamic") or inputs.get("type", "int") != weights.get("type", "int"):
        return "", "only a calibration has scales of inputs; ranks serve dynamic ones, of the weights' type."
    if config.get("kv_cache_scheme"):
        return "", "only a calibration has scales of the cache (kv_cache_scheme)."
    return cast(Channels, kind), ""


def _tower(vllm: Mapping[str, Any]) -> Tower:
    limits = vllm.get("limit_mm_per_prompt") or {}
    if vllm.get("language_model_only") or (limits.get("image") == 0 and limits.get("video") == 0):
        return "none"
    return "whole" if vllm.get("mm_encoder_tp_mode") == "data" else "sharded"


def has_our_extension(config: Any) -> bool:
    """Whether vLLM's workers run this package's extension, the only one that can load slices."""
    return _arguments(config).get("worker_extension_cls") == EXTENSION


def _overridden(config: Any) -> Mapping[str, Any]:
    """Return the user's overrides of the model's config for vLLM, given as a mapping or as JSON."""
    overrides = _arguments(config).get("hf_overrides") or {}
    return json.loads(overrides) if isinstance(overrides, str) else overrides


def _arguments(config: Any) -> Mapping[str, Any]:
    return server_arguments(config, "vllm")


def check_graphs(config: Any, model: Any, device: str) -> None:
    """Check that no sync moves the matrices of latent attention in memory, which CUDA graphs would not notice."""
    is_latent = model is not None and getattr(model.get_text_config(), "kv_lora_rank", None)
    if device == "cuda" and is_latent and not (config.get("enforce_eager") or versions.vllm_in(_KEEPS_LATENT_MATRICES)):
        rule = (
            f"vllm {versions.installed('vllm')} allocates the matrices of latent attention anew in every weight sync, "
            "and CUDA graphs keep the old memory, so rollouts would be silently wrong."
        )
        setting = f"{ROLLOUT}.enforce_eager"
        raise SettingError(setting, False, rule, f"{setting}=True, or vllm{_KEEPS_LATENT_MATRICES}")


def check_parallelism(config: Any, ranks: int, model: Any) -> None:
    """Reject parallel sizes that vLLM would refuse after its start, or that no sync mode could serve.

    Args:
        ranks: number of trainer ranks, each beside a vLLM worker; 0 for separate workers.
        model: the model's text config; None skips the checks that need it.
    """
    vllm, rollout = _arguments(config), VLLM.rollout_of(config)
    pipeline, experts = (size_of(config, f"{kind}_parallel_size") for kind in ("pipeline_model", "expert"))
    sizes = {"tensor_model": rollout.tp, "data": rollout.dp, "pipeline_model": pipeline}
    for kind, size in sizes.items():
        own, name = f"{ROLLOUT}.{kind}_parallel_size", f"{kind.removesuffix('_model')}_parallel_size"
        if size < 1:
            raise SettingError(own, size, "has to be at least 1.", f"{own}=1")
        given = vllm.get(name)
        if given is not None and given != size:
            rule = f"verl finds each rank's worker by {own}={size}, so another value feeds the wrong ones."
            raise SettingError(f"{_VLLM}.{name}", given, rule, f"{own}={given}, and no {_VLLM}.{name}")
    if vllm.get("enable_eplb"):
        rule = (
            "vLLM's loaders place experts in their start-up order while the router uses the rebalanced one, so after a "
            "sync the weights would be silently wrong."
        )
        raise SettingError(f"{_VLLM}.enable_eplb", True, rule, f"{_VLLM}.enable_eplb=False")
    if experts not in (1, rollout.workers):
        rule = f"vLLM spreads experts over all {rollout.workers} workers of a replica (tensor x data parallel)."
        raise SettingError(_EP, experts, rule, f"{_EP}={rollout.workers}, or 1")
    replica = rollout.workers * pipeline
    if ranks % replica and not disaggregated(config):
        rule = f"a replica of vLLM takes {replica} workers, and the {ranks} trainer ranks are not a multiple of that."
        works = [tp for tp in divisors(ranks) if ranks % (rollout.dp * pipeline * tp) == 0]
        best = f"{_TP} one of {works}" if works else f"{ROLLOUT}.data_parallel_size=1"
        raise SettingError(_TP, rollout.tp, rule, best)
    if model is not None:
        check_sizes(rollout, model)


def _check_family(config: Any, rollout: Any, requested: str) -> None:
    """Check that the installed vLLM, with its overrides, can serve the family in this sync mode on so many workers."""
    family, overrides = config.model_type, _overridden(rollout)
    releases, rule, named = layout.NOT_SERVED.get(family, ("", "", ""))
    if rule and named not in overrides and versions.vllm_in(releases):
        raise SettingError("actor_rollout_ref.model", family, rule, "another family; SFT trains this one")
    classes, known = overrides.get("architectures") or config.architectures, layout.CLASSES.get(family)
    setting = f"{_VLLM}.hf_overrides.architectures"
    if known and classes and known not in classes:
        rule = f"vLLM can run this family as {known} alone, as published checkpoints call the class."
        raise SettingError(setting, list(classes), rule, f"{setting}=[{known}]")
    releases, known = layout.CLASS_OF_SLICES.get(family, ("", ""))
    if known and classes and known not in classes and requested != "full" and versions.vllm_in(releases):
        rule = "for this name the installed vLLM has a class of its own, whose layout is not known here."
        raise SettingError(setting, list(classes), rule, f"{setting}=[{known}], or engine.rollout_sync=full")
    releases, rule = layout.WHOLE.get(family, ("", ""))
    tp = VLLM.rollout_of(rollout).tp
    if rule and tp > 1 and versions.vllm_in(releases):
        raise SettingError(_TP, tp, rule, f"{_TP}=1")


def _check_ignored(quantization: Any, model: nn.Module) -> None:
    """Check that ignored layers exist, because vLLM accepts any names and would quantise a misspelt layer."""
    modules = dict(model.named_modules())
    for key in _IGNORED if isinstance(quantization, Mapping) else ():
        for name in quantization.get(key) or ():
            parent, _, own = name.rpartition(".")
            if name.startswith("re:") or name in modules or (parent in modules and own in _FUSED):
                continue
            rule = f"{type(model).__name__} has no such layer, so that vLLM would quantise the one that was meant."
            near = close_matches(name, [*modules, *(f"{layer}.{own}" for layer in modules for own in _FUSED)], most=1)
            raise SettingError(f"{_OVERRIDES}.{key}", name, rule, f"one like {near}" if near else "leave it out")
