"""Reads verl's rollout config: how a replica is sharded, and what its workers hold weights in.

Each function takes the config as a mapping or as verl's dataclass.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

from .specs import Channels, Server, Tower
from .vllm_layout import Rollout

__all__ = [
    "BLOCK",
    "COMPRESSED",
    "EXTENSION",
    "OVERRIDES",
    "ROLLOUT",
    "SGLANG_LOADER",
    "VLLM",
    "compressed_kind",
    "has_our_extension",
    "is_disaggregated",
    "overridden",
    "quantisation_settings",
    "rollout_name",
    "rollout_of",
    "server_arguments",
    "size_of",
]

EXTENSION = "epfsdp2.rollout.vllm_worker.WeightSyncExtension"
SGLANG_LOADER = "epfsdp2.rollout.sglang.loader.load"
ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
OVERRIDES = f"{VLLM}.hf_overrides.quantization_config"
COMPRESSED = "compressed-tensors"
BLOCK = 128  # of a rollout.quantization=fp8, whose kind verl chooses (``_apply_quantization``)


def rollout_of(config: Any) -> Rollout:
    """Read how one rollout replica is sharded."""
    tp, dp = size_of(config, "tensor_model_parallel_size"), size_of(config, "data_parallel_size")
    server: Server = "sglang" if rollout_name(config) == "sglang" else "vllm"
    block = BLOCK if server == "vllm" and config.get("quantization") == "fp8" else 0
    quantization = None if block or server != "vllm" else overridden(config).get("quantization_config")
    channels = compressed_kind(quantization)[0]
    has_experts = size_of(config, "expert_parallel_size") > 1
    return Rollout(tp, dp, has_experts, _tower(server_arguments(config)), server, block, channels)


def compressed_kind(config: Any) -> tuple[Channels, str]:
    """Return what a config of compressed-tensors has weights held in; where slices can't serve it, "" and the reason.

    Args:
        config: vLLM's ``quantization_config``.
    """
    if isinstance(config, str) and "_per_" in config:  # of vLLM's own
        return "", "each worker quantises what it has fused and cut, in parameters that are in bfloat16 until then."
    if not isinstance(config, Mapping) or config.get("quant_method") != COMPRESSED:
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
    if vllm.get("language_model_only") or all(limits.get(kind) == 0 for kind in ("image", "video")):
        return "none"
    return "whole" if vllm.get("mm_encoder_tp_mode") == "data" else "sharded"


def is_disaggregated(config: Any) -> bool:
    disaggregation = config.get("disaggregation")
    return disaggregation is not None and bool(disaggregation.get("enabled"))


def has_our_extension(config: Any) -> bool:
    """Tell whether vLLM's workers run this package's extension, the only one that can load slices."""
    return server_arguments(config).get("worker_extension_cls") == EXTENSION


def quantisation_settings(config: Any) -> list[tuple[str, object]]:
    """Return the settings, with their values, that make vLLM quantise the weights that it receives."""
    qat = config.get("qat")
    asked = [
        (f"{ROLLOUT}.quantization", config.get("quantization")),
        (f"{VLLM}.quantization", server_arguments(config).get("quantization")),
        (OVERRIDES, overridden(config).get("quantization_config")),
        (f"{ROLLOUT}.qat.enable", qat is not None and qat.get("enable")),
    ]
    return [(setting, value) for setting, value in asked if value]


def rollout_name(config: Any) -> str:
    return config.get("name") or "vllm"


def size_of(config: Any, name: str) -> int:
    size = config.get(name)
    return 1 if size is None else size


def overridden(config: Any) -> Mapping[str, Any]:
    """Return what the user overrides of the model's config for vLLM, given as a mapping or as JSON."""
    overrides = server_arguments(config).get("hf_overrides") or {}
    return json.loads(overrides) if isinstance(overrides, str) else overrides


def server_arguments(config: Any, server: Server = "vllm") -> Mapping[str, Any]:
    """Return what the user passes to vLLM or SGLang itself (``engine_kwargs``)."""
    return (config.get("engine_kwargs") or {}).get(server) or {}
