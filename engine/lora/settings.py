"""verl's LoRA settings of a model, and peft's settings that verl has no name for."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.values import get_setting, plain
from ..errors import SettingError, listed

__all__ = ["ADAPTER_CONFIG", "LoraSettings"]

ADAPTER_CONFIG = "adapter_config.json"
# peft's settings that change an adapter's computation, with the one supported value.
_PLAIN = {
    "peft_type": "LORA",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "bias": "none",
    "lora_dropout": 0.0,
    "trainable_token_indices": None,
}
# peft's settings that verl has no name for; users set them under ``lora`` of a model's settings.
_OF_PEFT = (
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
)
_TYPES = ("lora", "dora")


@dataclass(frozen=True)
class LoraSettings:
    """verl's LoRA settings of a model; names and meaning are peft's.

    Args:
        node: the name of the model's settings, as users type it.
        rank, alpha: an adapted weight computes as ``W + alpha / rank * B @ A``.
        target_modules: ``all-linear``, a pattern of whole names, or suffixes of names; for linears and expert weights.
        target_parameters: suffixes of names of further expert weights.
        exclude_modules: as ``target_modules``, for weights that get no adapter.
        adapter: folder of a peft adapter to continue from, which determines all other settings.
        use_rslora: divide alpha by the square root of the rank.
        use_dora: train the norms of a linear's rows as well, ``m * (W + scaling * B @ A) / norm(W + scaling * B @ A)``.
        rank_pattern, alpha_pattern: ranks and alphas by patterns of the end of a weight's name.
        layers_to_transform: indices of the layers that get adapters; empty for all.
        layers_pattern: names of the lists of layers that ``layers_to_transform`` indexes.
        modules_to_save: suffixes of names of modules that are trained whole, as copies beside their frozen originals.
        value_head: name of a critic's head, also trained whole; its original is no pretrained weight.
    """

    node: str
    rank: int
    alpha: float
    target_modules: str | tuple[str, ...]
    target_parameters: tuple[str, ...] = ()
    exclude_modules: str | tuple[str, ...] = ()
    adapter: Path | None = None
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    value_head: str = ""

    def rank_of(self, name: str) -> int:
        """Return the rank of the adapter of a module or parameter."""
        return _by_pattern(self.rank_pattern, name, self.rank)

    def alpha_of(self, name: str) -> float:
        return _by_pattern(self.alpha_pattern, name, self.alpha)

    def scaling_of(self, name: str) -> float:
        """Return the factor of ``B @ A``."""
        rank = self.rank_of(name)
        return self.alpha_of(name) / (math.sqrt(rank) if self.use_rslora else rank)

    @classmethod
    def of(cls, model: Any, node: str) -> "LoraSettings | None":
        """Read verl's model settings, a mapping or ``HFModelConfig``; return None for a model without adapters.

        Raises:
            SettingError: a value is wrong for every model, or training can't continue from the adapter.
        """

        def given(name: str, default: Any = None) -> Any:
            value = get_setting(model, name)
            return default if value is None else value

        rank, path = given("lora_rank", 0), given("lora_adapter_path")
        if not _is_count(rank, 0):
            raise SettingError(
                f"{node}.lora_rank",
                rank,
                "has to be an integer of at least 0; 0 means no adapter.",
                f"{node}.lora_rank=8",
            )
        if path is not None:
            return cls._of_adapter(Path(path).expanduser(), rank, node)
        if not rank:
            return None
        alpha = given("lora_alpha", 16)
        if not _is_positive(alpha):
            raise SettingError(
                f"{node}.lora_alpha", alpha, "has to be a positive number.", f"{node}.lora_alpha={2 * rank}"
            )
        return cls(
            node,
            rank,
            alpha,
            _names(given("target_modules", ())),
            tuple(given("target_parameters", ())),
            _names(given("exclude_modules", ())),
            **_of_peft(plain(given("lora", {})), f"{node}.lora"),
        )

    @classmethod
    def _of_adapter(cls, folder: Path, rank: int, node: str) -> "LoraSettings":
        setting = f"{node}.lora_adapter_path"
        found = cls.of_folder(folder, node)
        if found.rank != rank:
            rule = f"differs from the rank of {setting}={folder}."
            raise SettingError(f"{node}.lora_rank", rank, rule, f"{node}.lora_rank={found.rank}")
        return found

    @classmethod
    def of_folder(cls, folder: Path, node: str) -> "LoraSettings":
        """Read the settings of a peft adapter.

        Raises:
            SettingError: the folder has no adapter, or an unsupported one.
        """
        setting = f"{node}.lora_adapter_path"
        if not (folder / ADAPTER_CONFIG).is_file():
            works = "a folder with an adapter that peft or this engine has saved (.../actor/lora_adapter)"
            raise SettingError(setting, folder, f"it holds no {ADAPTER_CONFIG}.", works)
        found = _config_of(folder, setting)
        for name, off in _PLAIN.items():
            if found.get(name, off) not in (off, None):
                rule = f"its {name} is {found[name]}, which this engine does not compute."
                raise SettingError(setting, folder, rule, f"an adapter with {name}={off}")
        return cls(
            node,
            found["r"],
            found["lora_alpha"],
            _names(found.get("target_modules") or ()),
            tuple(found.get("target_parameters") or ()),
            _names(found.get("exclude_modules") or ()),
            folder,
            **_of_peft({name: found[name] for name in _OF_PEFT if name in found}, setting),
        )


def _config_of(folder: Path, setting: str) -> dict[str, Any]:
    """Read a folder's ``adapter_config.json``.

    Raises:
        SettingError: the file is no config of an adapter.
    """
    rules = {"r": int, "lora_alpha": int | float}
    names = ("target_modules", "target_parameters", "exclude_modules")
    try:
        found = json.loads((folder / ADAPTER_CONFIG).read_text())
        wrong = [name for name, kind in rules.items() if type(found[name]) is bool or not isinstance(found[name], kind)]
        wrong += [name for name in names if not _is_names(found.get(name))]
        if wrong:
            raise ValueError(f"{wrong[0]} is {str(found[wrong[0]])[:80]}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        rule = f"its {ADAPTER_CONFIG} is damaged ({type(error).__name__}: {error})."
        raise SettingError(setting, folder, rule, "a folder with an adapter as peft saves it") from error
    return found


def _is_names(value: Any) -> bool:
    return value is None or isinstance(value, str) or all(isinstance(name, str) for name in list(value))


def _of_peft(given: Mapping[str, Any], node: str) -> dict[str, Any]:
    """Check and convert the settings of peft that verl has no name for."""
    if given.get("type", "lora") not in _TYPES:
        raise SettingError(
            f"{node}.type", given["type"], f"is one of {listed(list(_TYPES))} here.", f"{node}.type=lora"
        )
    found = {name: given[name] for name in _OF_PEFT if given.get(name) is not None}
    if given.get("type") == "dora":
        found["use_dora"] = True

    def check(name: str, is_right: bool, rule: str, works: str) -> None:
        if not is_right:
            raise SettingError(f"{node}.{name}", found[name], rule, f"+{node}.{name}={works}")

    for name in ("use_rslora", "use_dora"):
        check(name, isinstance(found.get(name, False), bool), "is true or false.", "true")
    for name, fits, what, works in (
        ("rank_pattern", _is_count, "an integer of at least 1", "{q_proj: 16}"),
        ("alpha_pattern", _is_positive, "a positive number", "{q_proj: 32}"),
    ):
        value = found.get(name, {})
        is_right = isinstance(value, Mapping) and all(_is_pattern(k) and fits(v) for k, v in value.items())
        check(name, is_right, f"maps patterns of names to {what}.", works)
    for name, kind, what, works in (
        ("layers_to_transform", int, "numbers of layers", "[0,1]"),
        ("layers_pattern", str, "names of a list of layers", "[layers]"),
        ("modules_to_save", str, "names of modules, or their ends", "[lm_head]"),
    ):
        if name not in found:
            continue
        entries = [found[name]] if isinstance(found[name], kind) else found[name]
        is_right = isinstance(entries, list | tuple) and all(
            isinstance(each, kind) and not isinstance(each, bool) for each in entries
        )
        check(name, is_right, f"is a list of {what}.", works)
        found[name] = tuple(entries)
    return found


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that a name ends with, as peft's ``get_pattern_key`` does."""
    # Some linears are parameters in peft, named with ``.weight`` (``peft_files.py``).
    names = (name, name.removesuffix(".weight"))
    return next((v for key, v in patterns.items() if any(re.match(rf"(.*\.)?({key})$", n) for n in names)), default)


def _is_pattern(text: Any) -> bool:
    try:
        re.compile(text)
    except (re.error, TypeError):
        return False
    return True


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _names(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(value)
