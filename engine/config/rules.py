"""Types and ranges of settings: each field of the engine's settings is declared with its rule.

A rule is a function of the setting's name and its value that raises ``SettingError``. It takes a value of any kind,
since a command line can give one.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, field
from typing import Any

from ..errors import SettingError
from .values import DTYPES

__all__ = [
    "DTYPE",
    "EXPERT_PLAN",
    "FLAG",
    "KEPT_DTYPE",
    "LOSS_WEIGHT",
    "MIXED_PRECISION",
    "PATTERNS",
    "POSITIVE",
    "POSITIVE_NUMBER",
    "PRECISION_KEYS",
    "REPLAY",
    "REPLAY_MODES",
    "SEED",
    "Rule",
    "is_whole",
    "must",
    "one_of",
    "optional",
    "setting",
    "whole",
]

Rule = Callable[[str, Any], None]

PRECISION_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")
REPLAY_MODES = ("disabled", "R2", "R3")
_SEEDS = 2**32  # numpy's, which verl seeds as well


def setting(
    default: Any,
    rule: Rule,
    text: str,
    *,
    factory: Callable[[], Any] | Any = MISSING,
    inner: Mapping[str, tuple[Any, str]] | None = None,
    shards: bool | str = False,
    of_experts: bool = False,
) -> Any:
    """Declare a setting: a dataclass field with all that is known of it.

    Args:
        text: what it does, as the YAML and the docs say it.
        factory: makes the default, where that is mutable.
        inner: of a mapping with settings of its own, the default and the text of each.
        shards: whether it is a field of ``ShardingOptions``; or the name of that field, if it is another one.
        of_experts: whether it concerns experts alone.
    """
    known = {"rule": rule, "text": text, "inner": inner or {}, "shards": shards, "of_experts": of_experts}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=known)
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
    # True == 1 and 2.0 == 2, and a command line gives both by mistake.
    return isinstance(value, int) and not isinstance(value, bool)


def whole(least: int, says: str, works: str, besides: Collection[int] = ()) -> Rule:
    return must(lambda value: is_whole(value) and (value >= least or value in besides), says, works)


def one_of(choices: Collection[str], works: str) -> Rule:
    says = f"is one of {', '.join(choices)}."
    return must(lambda value: isinstance(value, str) and value in choices, says, works)


def optional(rule: Rule) -> Rule:
    """Make a rule that also accepts None."""

    def or_none(name: str, value: Any) -> None:
        if value is not None:
            rule(name, value)

    return or_none


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _dtype(names: Collection[str], works: str, because: str = ".") -> Rule:
    says = f"is one of {', '.join(names)}{because}"
    return must(lambda value: isinstance(value, str) and value in names, says, works)


def _mixed_precision(name: str, value: Any) -> None:
    if value is None or value == {}:
        return
    if not isinstance(value, Mapping):
        raise SettingError(name, value, "is null or a mapping.", f"{name}={{param_dtype:bf16}}")
    unknown = sorted(str(key) for key in value if key not in PRECISION_KEYS)
    if unknown:
        given = {str(key): entry for key, entry in value.items()}[unknown[0]]
        raise SettingError(f"{name}.{unknown[0]}", given, "there is no such key.", f"keys {', '.join(PRECISION_KEYS)}")
    for key, dtype in value.items():
        (DTYPE if key == "param_dtype" else KEPT_DTYPE)(f"{name}.{key}", dtype)
    buffers = value.get("buffer_dtype", "fp32")
    if DTYPES[buffers].itemsize != 4:
        rule = "buffers are never cast: they stay float32."
        works = f"{name}.buffer_dtype=fp32, or leave the key out"
        raise SettingError(f"{name}.buffer_dtype", buffers, rule, works)


def _replay(name: str, value: Any) -> None:
    if not hasattr(value, "replay_file"):  # a mapping has become verl's config of it
        works = f"{name}.mode={value}" if isinstance(value, str) and value in REPLAY_MODES else f"{name}.mode=disabled"
        raise SettingError(name, value, "is a mapping.", works)
    for key in ("record_file", "replay_file"):
        file = getattr(value, key)
        if file is not None:
            raise SettingError(f"{name}.{key}", file, "routes are kept in the batch, and in no file.", "leave it out")


def _is_plan(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(pattern, str) and is_whole(dim) and dim >= 0 for pattern, dim in value.items()
    )


def _are_patterns(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(pattern, str) for pattern in value)


FLAG = must(lambda value: isinstance(value, bool), "is true or false.", "true")
POSITIVE = whole(1, "has to be a positive whole number.", "1")
POSITIVE_NUMBER = must(lambda v: _is_number(v) and v > 0, "has to be a positive number.", "300")
LOSS_WEIGHT = must(lambda v: _is_number(v) and v >= 0, "is a weight of a loss: 0 or more.", "0.001")
SEED = must(lambda v: is_whole(v) and 0 <= v < _SEEDS, f"is a whole number from 0 to {_SEEDS - 1}.", "42")
DTYPE = _dtype(DTYPES, "bf16")
KEPT_DTYPE = _dtype(
    [name for name in DTYPES if name not in ("fp16", "float16")],
    "fp32",
    ": float16 is for what is computed with (dtype), not for parameters and sums that are kept.",
)
MIXED_PRECISION: Rule = _mixed_precision
REPLAY: Rule = _replay
EXPERT_PLAN = optional(
    must(
        _is_plan,
        "maps patterns of parameter names to the dim that counts the experts.",
        "'{model.layers.*.moe.w1: 0}'",
    )
)
PATTERNS = must(_are_patterns, "is a list of patterns of module names.", "['*.mlp.gate']")
