"""What is made of the declared settings: options of ``parallelize``, and overrides as a command line has them."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from ..errors import SettingError, close_matches
from ..fsdp.options import ShardingOptions
from ..settings.values import DTYPES, get_setting
from .engine_settings import EngineSettings, check_fields

__all__ = [
    "PLANNED",
    "as_yaml",
    "expert_settings",
    "param_dtype",
    "planned_overrides",
    "planned_settings",
    "sharding_options",
]

PLANNED = ("model_dtype", "dtype", "mixed_precision", *(f.name for f in fields(EngineSettings) if f.metadata["shards"]))
"""The settings that the memory and the traffic of a step on one mesh depend on."""


def expert_settings() -> dict[str, Any]:
    """Return the settings that concern experts alone, with their defaults."""
    return {entry.name: entry.default for entry in fields(EngineSettings) if entry.metadata["of_experts"]}


def sharding_options(config: Any, model: Any = None) -> ShardingOptions:
    """Return what ``parallelize`` gets of the settings that are declared with ``shards``, and of some of verl's.

    Args:
        config: the engine's settings.
        model: verl's settings of the model, mapping or object; what they say is off where they are missing.
    """
    declared = {
        entry.name if shards is True else shards: getattr(config, entry.name)
        for entry in fields(EngineSettings)
        if (shards := entry.metadata["shards"])
    }
    # What is automatic is off until sizes decide (``automatic.py``).
    declared["dispatch_chunks"] = max(declared["dispatch_chunks"], 1)
    declared["overlap_shared_experts"] = bool(declared["overlap_shared_experts"])
    if declared["checkpointing"] == "auto":
        declared["checkpointing"] = "full" if get_setting(model, "enable_gradient_checkpointing") else "none"
    return ShardingOptions(
        **declared,
        param_dtype=param_dtype(config),
        reduce_dtype=DTYPES[(config.mixed_precision or {}).get("reduce_dtype", "fp32")],
        activation_offload=bool(get_setting(model, "enable_activation_offload")),
        head_in_root=bool(get_setting(model, "use_fused_kernels")),
    )


def param_dtype(config: Any) -> torch.dtype:
    """Return the dtype in which parameters are gathered and computed with."""
    return DTYPES[(config.mixed_precision or {}).get("param_dtype", config.dtype)]


def planned_overrides(config: Any, options: ShardingOptions) -> list[str]:
    """Return the ``PLANNED`` settings that are not at their default, as ``planned_settings`` takes them."""
    default = _planned_default()
    values = {name: getattr(config, name) for name in PLANNED}
    values |= {"activation_checkpointing": options.checkpointing, "fuse_dense": options.fuse_dense}
    return [f"engine.{name}={as_yaml(value)}" for name, value in values.items() if value != getattr(default, name)]


def planned_settings(overrides: Mapping[str, Any]) -> EngineSettings:
    """Return the settings with these values, by their names under ``engine.``.

    Raises:
        SettingError: for a value that breaks its rule, or a name that is not ``PLANNED``.
    """
    settings = _planned_default()
    for name, value in overrides.items():
        if name not in PLANNED:
            near = close_matches(name, PLANNED, most=1, cutoff=0.6)
            works = f"engine.{near[0]}" if near else f"one of: {', '.join(PLANNED)}"
            raise SettingError(f"engine.{name}", value, "the plan does not depend on such a setting.", works)
        setattr(settings, name, value)
    check_fields(settings)
    return settings


def _planned_default() -> EngineSettings:
    return EngineSettings(activation_checkpointing="full")


def as_yaml(value: Any) -> str:
    """Format a setting's value in one line, as YAML and Hydra's command line read it."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_yaml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)
