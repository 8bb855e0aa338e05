"""verl's LoRA settings of a model, and peft's settings that verl has no name for."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..config.values import get_setting, plain
from ..errors import SettingError, nearest

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


def _is_a(kind: Any, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _are(kind: Any, value: Any) -> bool:
    return _is_a(kind, value) or isinstance(value, list | tuple) and all(_is_a(kind, each) for each in value)


def _is_count(value: Any, least: int = 1) -> bool:
    return _is_a(int, value) and value >= least


def _is_positive(value: Any) -> bool:
    return _is_a(int | float, value) and value > 0


def _maps(fits: Callable[[Any], bool], value: Any) -> bool:
    try:
        return all(re.compile(pattern) and fits(each) for pattern, each in value.items())
    except (re.error, TypeError, AttributeError):
        return False


# peft's settings that verl has no name for, with their rules; users set them under ``lora`` of a model's settings.
_OF_PEFT: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "use_rslora": (lambda value: isinstance(value, bool), "is true or false.", "true"),
    "use_dora": (lambda value: isinstance(value, bool), "is true or false.", "true"),
    "rank_pattern": (partial(_maps, _is_count), "maps patterns of names to an integer of at least 1.", "{q_proj: 16}"),
    "alpha_pattern": (partial(_maps, _is_positive), "maps patterns of names to a positive number.", "{q_proj: 32}"),
    "layers_to_transform": (partial(_are, int), "is a list of numbers of layers.", "[0,1]"),
    "layers_pattern": (partial(_are, str), "is a list of names of a list of layers.", "[layers]"),
    "modules_to_save": (partial(_are, str), "is a list of names of modules, or their ends.", "[lm_head]"),
}
# verl's settings for Megatron's adapters, with the defaults that are there whatever the engine is.
_OF_MEGATRON: dict[str, Any] = {
    "alpha": 32,
    "dropout": 0.0,
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "exclude_modules": [],
    "dropout_position": "pre",
    "lora_A_init_method": "xavier",
    "lora_B_init_method": "zero",
    "a2a_experimental": False,
    "dtype": None,
    "adapter_path": None,
    "freeze_vision_model": True,
    "freeze_vision_projection": True,
    "freeze_language_model": True,
}
# Settings under ``lora`` that this engine (``preflight``, ``engine.py``) or verl's rollout reads.
_READ_ELSEWHERE = ("type", "merge", "rank", "fully_sharded_loras")


@dataclass(frozen=True)
class LoraSettings:
    """verl's LoRA settings of a model; names and meaning are peft's.

    Args:
        node: the name of the model's settings, as users type it.
        target_modules: ``all-linear``, a pattern of whole names, or suffixes of names; for linears and expert weights.
        target_parameters: suffixes of names of further expert weights.
        adapter: folder of a peft adapter to continue from, which determines all other settings.
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

    def error(self, name: str, rule: str, works: str) -> SettingError:
        """Return the error of one of these settings, with its value."""
        value = getattr(self, name)
        setting = f"{self.node}.{'lora.' if name in _OF_PEFT else ''}{name}"
        return SettingError(setting, list(value) if isinstance(value, tuple) else value, rule, works)

    def of_weight(self, name: str) -> tuple[int, float, float]:
        """Return the rank and the alpha of a weight's adapter, and the factor of ``B @ A``."""
        rank, alpha = _by_pattern(self.rank_pattern, name, self.rank), _by_pattern(self.alpha_pattern, name, self.alpha)
        return rank, alpha, alpha / (math.sqrt(rank) if self.use_rslora else rank)

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
        setting, rule = f"{node}.lora_rank", "has to be an integer of at least 0; 0 means no adapter."
        if not _is_count(rank, 0):
            raise SettingError(setting, rank, rule, f"{setting}=8")
        if path is not None:
            found = cls.of_folder(folder := Path(path).expanduser(), node)
            if found.rank != rank:
                rule = f"differs from the rank of {node}.lora_adapter_path={folder}."
                raise SettingError(setting, rank, rule, f"{setting}={found.rank}")
            return found
        if not rank:
            return None
        alpha, setting = given("lora_alpha", 16), f"{node}.lora_alpha"
        if not _is_positive(alpha):
            raise SettingError(setting, alpha, "has to be a positive number.", f"{setting}={2 * rank}")
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
    def of_folder(cls, folder: Path, node: str) -> "LoraSettings":
        """Read the settings of a peft adapter.

        Raises:
            SettingError: the folder has no adapter, or an unsupported one.
        """
        setting = f"{node}.lora_adapter_path"
        if not (folder / ADAPTER_CONFIG).is_file():
            works = "a folder with an adapter that peft or this engine has saved (.../actor/lora_adapter)"
            raise SettingError(setting, folder, f"it holds no {ADAPTER_CONFIG}.", works)
        try:
            found = json.loads((folder / ADAPTER_CONFIG).read_text())
            is_right = {"r": _is_a(int, found["r"]), "lora_alpha": _is_a(int | float, found["lora_alpha"])}
            for name in ("target_modules", "target_parameters", "exclude_modules"):
                names = found.get(name)
                is_right[name] = names is None or all(isinstance(each, str) for each in list(names))
            wrong = [name for name in is_right if not is_right[name]]
            if wrong:
                raise ValueError(f"{wrong[0]} is {str(found[wrong[0]])[:80]}")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            rule = f"its {ADAPTER_CONFIG} is damaged ({type(error).__name__}: {error})."
            raise SettingError(setting, folder, rule, "a folder with an adapter as peft saves it") from error
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


def _of_peft(given: Mapping[str, Any], node: str) -> dict[str, Any]:
    """Check and convert the settings of peft that verl has no name for."""
    if given.get("type", "lora") not in ("lora", "dora"):
        raise SettingError(f"{node}.type", given["type"], "is one of lora; dora here.", f"{node}.type=lora")
    for name, value in given.items():
        setting, default = f"{node}.{name}", _OF_MEGATRON.get(name)
        if name in _OF_MEGATRON and value not in (default, None):
            rule = "is verl's setting for Megatron's adapters."
            raise SettingError(setting, value, rule, f"{setting}={'null' if default is None else default}")
        if name not in _OF_MEGATRON and name not in (known := (*_OF_PEFT, *_READ_ELSEWHERE)):
            works = nearest(node, name, known) or f"one of: {', '.join(known)}"
            raise SettingError(setting, value, "there is no such setting of adapters.", works)
    found = {name: given[name] for name in _OF_PEFT if given.get(name) is not None}
    if given.get("type") == "dora":
        found["use_dora"] = True

    for name, value in found.items():
        is_right, rule, works = _OF_PEFT[name]
        if not is_right(value):
            raise SettingError(f"{node}.{name}", value, rule, f"+{node}.{name}={works}")
        if isinstance(value, int | str) and not isinstance(value, bool):
            found[name] = (value,)
        elif isinstance(value, list):
            found[name] = tuple(value)
    return found


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that a name ends with, as peft's ``get_pattern_key`` does."""
    # Some linears are parameters in peft, named with ``.weight`` (``peft_files.py``).
    names = (name, name.removesuffix(".weight"))
    return next((v for key, v in patterns.items() if any(re.match(rf"(.*\.)?({key})$", n) for n in names)), default)


def _names(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(value)
