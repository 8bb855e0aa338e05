"""Names and values of verl's settings, read without omegaconf, and the rules of ours.

A rule is a function of a name and any value that raises ``SettingError`` for a wrong type or range.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import SettingError

__all__ = [
    "ACTOR_MODEL",
    "CHECKPOINT_BACKEND",
    "DEFAULT_ATTENTION",
    "DTYPE",
    "DTYPES",
    "EXPERT_PLAN",
    "FLAG",
    "KEPT_DTYPE",
    "LOSS_WEIGHT",
    "MIXED_PRECISION",
    "OPTIMIZERS",
    "PATTERNS",
    "POSITIVE",
    "POSITIVE_NUMBER",
    "REPLAY",
    "SEED",
    "STRATEGY",
    "attention_of",
    "get_setting",
    "is_whole",
    "must",
    "one_of",
    "optional",
    "overrides_of",
    "plain",
    "setting",
    "whole",
]

Rule = Callable[[str, Any], None]

STRATEGY = "epfsdp2"
ACTOR_MODEL = "actor_rollout_ref.model"
CHECKPOINT_BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
# Name of the optimizer's node, by the name of the model's.
OPTIMIZERS = {ACTOR_MODEL: "actor_rollout_ref.actor.optim", "critic.model": "critic.optim", "model": "optim"}
DEFAULT_ATTENTION = "flash_attention_2"  # verl 0.9.1, workers/config/model.py
# Names of dtypes in settings; float16 is for the compute alone.
DTYPES = {
    **{"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16},
    **{"fp16": torch.float16, "float16": torch.float16},
}
_PRECISION_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")
_REPLAY_MODES = ("disabled", "R2", "R3")
_SEEDS = 2**32  # numpy's limit, because verl seeds numpy too


def overrides_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's overrides of the model's config, from either of the two places where verl accepts them."""
    overrides = plain(model.get("override_config") or {})
    return overrides.get("model_config", overrides)


def attention_of(model: Mapping[str, Any]) -> str:
    """Return the attention implementation that the run asks for, whatever the model's config.json says."""
    return str(overrides_of(model).get("attn_implementation", DEFAULT_ATTENTION))


def plain(value: Any) -> Any:
    """Convert omegaconf containers to dicts and lists, without importing omegaconf."""
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in value}
    if hasattr(value, "__iter__") and not isinstance(value, str | torch.Tensor):
        return [plain(item) for item in value]
    return value


def get_setting(node: Any, name: str, default: Any = None) -> Any:
    """Return a setting of one of verl's config nodes, mapping or dataclass, by its dotted name."""
    value = node
    for part in name.split("."):
        value = value.get(part, default) if isinstance(value, Mapping) else getattr(value, part, default)
    return value


def setting(default: Any, rule: Rule, *, shards: bool | str = False, of_experts: bool = False) -> Any:
    """Declare a setting as a dataclass field.

    Args:
        default: a value, or a function that makes it if it is mutable.
        shards: whether it is a field of ``ShardingOptions``, or that field's name if it differs.
        of_experts: whether it concerns experts alone.
    """
    known = {"rule": rule, "shards": shards, "of_experts": of_experts}
    if callable(default):
        return field(default_factory=default, metadata=known)
    return field(default=default, metadata=known)


def must(holds: Callable[[Any], bool], says: str, works: str) -> Rule:
    """Make a rule that refuses values for which ``holds`` is false.

    Args:
        says: the rule, as it follows "name=value: ".
        works: a value that works.
    """

    def rule(name: str, value: Any) -> None:
        if not holds(value):
            raise SettingError(name, value, says, f"{name}={works}")

    return rule


def is_whole(value: Any) -> bool:
    # A command line gives True and 2.0 by mistake, and Python has True == 1 and 2.0 == 2.
    return isinstance(value, int) and not isinstance(value, bool)


def whole(least: int, says: str, works: str, besides: Collection[int] = ()) -> Rule:
    return must(lambda value: is_whole(value) and (value >= least or value in besides), says, works)


def one_of(choices: Collection[str], works: str, because: str = ".") -> Rule:
    says = f"is one of {', '.join(choices)}{because}"
    return must(lambda value: isinstance(value, str) and value in choices, says, works)


def optional(rule: Rule) -> Rule:
    """Make a rule that also accepts None."""

    def or_none(name: str, value: Any) -> None:
        if value is not None:
            rule(name, value)

    return or_none


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_plan(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(pattern, str) and is_whole(dim) and dim >= 0 for pattern, dim in value.items()
    )


def _are_patterns(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(pattern, str) for pattern in value)


def _mixed_precision(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise SettingError(name, value, "is null or a mapping.", f"{name}={{param_dtype:bf16}}")
    for key, dtype in value.items():
        if key not in _PRECISION_KEYS:
            raise SettingError(f"{name}.{key}", dtype, "there is no such key.", f"keys {', '.join(_PRECISION_KEYS)}")
        (DTYPE if key == "param_dtype" else KEPT_DTYPE)(f"{name}.{key}", dtype)
        if key == "buffer_dtype" and DTYPES[dtype].itemsize != 4:
            rule, works = "buffers are never cast: they stay float32.", f"{name}.{key}=fp32, or leave the key out"
            raise SettingError(f"{name}.{key}", dtype, rule, works)


def _replay(name: str, value: Any) -> None:
    entries = vars(value) if isinstance(value, SimpleNamespace) else value
    if not isinstance(entries, Mapping):
        mode = value if isinstance(value, str) and value in _REPLAY_MODES else "disabled"
        raise SettingError(name, value, "is a mapping.", f"{name}.mode={mode}")
    for key, entry in entries.items():
        if key == "mode":
            one_of(_REPLAY_MODES, "disabled")(f"{name}.mode", entry)
        elif key not in ("record_file", "replay_file", "_target_"):
            raise SettingError(f"{name}.{key}", entry, "the engine has no such setting.", f"{name}.mode=disabled")
        elif key != "_target_" and entry is not None:
            raise SettingError(f"{name}.{key}", entry, "routes are kept in the batch, and in no file.", "leave it out")


FLAG = must(lambda value: isinstance(value, bool), "is true or false.", "true")
POSITIVE = whole(1, "has to be a positive whole number.", "1")
POSITIVE_NUMBER = must(lambda value: _is_number(value) and value > 0, "has to be a positive number.", "300")
LOSS_WEIGHT = must(lambda value: _is_number(value) and value >= 0, "is a weight of a loss: 0 or more.", "0.001")
SEED = must(lambda value: is_whole(value) and 0 <= value < _SEEDS, f"is a whole number from 0 to {_SEEDS - 1}.", "42")
DTYPE = one_of(DTYPES, "bf16")
KEPT_DTYPE = one_of(
    [name for name in DTYPES if name not in ("fp16", "float16")],
    "fp32",
    ": float16 is for the compute (dtype), not for parameters and sums that are kept.",
)
MIXED_PRECISION = optional(_mixed_precision)
REPLAY: Rule = _replay
EXPERT_PLAN = optional(
    must(
        _is_plan,
        "maps patterns of parameter names to the dim that counts the experts.",
        "'{model.layers.*.moe.w1: 0}'",
    )
)
PATTERNS = must(_are_patterns, "is a list of patterns of module names.", "['*.mlp.gate']")
