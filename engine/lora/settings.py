"""Read verl's LoRA settings, and find the weights of a model that they select."""

import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import SettingError, close_matches
from ..model.hf_convert import revert
from ..model.layers import layer_names
from ..moe.find import ExpertsInfo, UnsupportedModelError, find_experts
from ..settings.values import get_setting

__all__ = ["ADAPTER_CONFIG", "LoraSettings", "Target", "find_targets"]

ADAPTER_CONFIG = "adapter_config.json"
_ALL = "all-linear"
# peft's settings that could change what an adapter computes, with the values at which they don't.
_PLAIN = {
    "peft_type": "LORA",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "bias": "none",
    "lora_dropout": 0.0,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
}


@dataclass(frozen=True)
class LoraSettings:
    """verl's LoRA settings of a model; names and meaning are peft's.

    Args:
        node: the name of the model's settings, as users type it.
        rank, alpha: an adapted weight computes as ``W + alpha / rank * B @ A``.
        target_modules: ``all-linear``, a pattern of whole names, or suffixes of names; for linears and expert weights.
        target_parameters: suffixes of names of further expert weights.
        exclude_modules: as ``target_modules``, for weights that get no adapter.
        adapter: folder of a peft adapter to continue from, which then determines rank, alpha and targets.
    """

    node: str
    rank: int
    alpha: float
    target_modules: str | tuple[str, ...]
    target_parameters: tuple[str, ...] = ()
    exclude_modules: str | tuple[str, ...] = ()
    adapter: Path | None = None

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def of(cls, model: Any, node: str) -> "LoraSettings | None":
        """Read verl's model settings, a mapping or ``HFModelConfig``; return None if they want no adapter.

        Raises:
            SettingError: a value is wrong for any model, or training can't continue from the adapter.
        """

        def given(name: str, default: Any = None) -> Any:
            value = get_setting(model, name)
            return default if value is None else value

        rank, path = given("lora_rank", 0), given("lora_adapter_path")
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
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
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha <= 0:
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
        )

    @classmethod
    def _of_adapter(cls, folder: Path, rank: int, node: str) -> "LoraSettings":
        setting = f"{node}.lora_adapter_path"
        if not (folder / ADAPTER_CONFIG).is_file():
            works = "a folder with an adapter that peft or this engine has saved (.../actor/lora_adapter)"
            raise SettingError(setting, folder, f"it holds no {ADAPTER_CONFIG}.", works)
        found = _config_of(folder, setting)
        for name, plain in _PLAIN.items():
            if found.get(name, plain) not in (plain, None):
                rule = f"its {name} is {found[name]}, but this engine only has adapters W + alpha / r * B @ A."
                raise SettingError(setting, folder, rule, f"an adapter with {name}={plain}")
        if found["r"] != rank:
            rule = f"differs from the rank of {setting}={folder}."
            raise SettingError(f"{node}.lora_rank", rank, rule, f"{node}.lora_rank={found['r']}")
        return cls(
            node,
            rank,
            found["lora_alpha"],
            _names(found.get("target_modules") or ()),
            tuple(found.get("target_parameters") or ()),
            _names(found.get("exclude_modules") or ()),
            folder,
        )


def _config_of(folder: Path, setting: str) -> dict[str, Any]:
    """
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


def _names(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(value)


def _typed(names: str | tuple[str, ...]) -> str | list[str]:
    return names if isinstance(names, str) else list(names)


@dataclass(frozen=True)
class Target:
    """A weight that gets an adapter.

    Args:
        name: the name of the weight in the model.
        module: the module that owns it.
        own: its name in the module.
        experts: number of experts that it stacks; None for the weight of a linear.
        is_transposed: whether it is stored ``[..., in, out]``.
    """

    name: str
    module: nn.Module
    own: str
    experts: int | None
    is_transposed: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """``(in, out)`` of the linear map."""
        first, second = self.module.get_parameter(self.own).shape[-2:]
        return (first, second) if self.is_transposed else (second, first)


def find_targets(model: nn.Module, settings: LoraSettings, plan: Mapping[str, int] | None = None) -> list[Target]:
    """Find the weights that the settings select: linears, then stacks of experts, in the model's order.

    Linears of the layers match by their name, stacks of experts by their own name and by those of their tensors in a
    checkpoint (``gate_proj`` and ``up_proj``). Heads, embeddings and routers never match, nor do linears whose weight
    the family's code reads instead of calling them (Mamba's ``out_proj``): an adapter acts where a linear is called.

    Args:
        model: a model that is not sharded yet.
        plan: ``engine.expert_plan``.

    Raises:
        SettingError: an entry matches nothing, or only a part of a stack.
    """
    experts = _experts(model, plan)
    linears = _linears(model, experts)
    read = [name for name in linears if _is_read(model, name)]
    known = {**{name: target for name, target in linears.items() if name not in read}, **_stacks(experts)}
    names = {name: _names_of(model, target) for name, target in known.items()}
    _check_entries(settings, names, [name.removesuffix(".weight") for name in read])
    chosen = []
    for name, target in known.items():
        # Its own name selects all of it, each name of the checkpoint one part.
        own, *parts = names[name]
        if _matches(own, settings.exclude_modules):
            continue
        whole = _is_named(own, settings)
        named = {
            part: (whole or _is_named(part, settings)) and not _matches(part, settings.exclude_modules)
            for part in parts
        }
        missing = [part.rpartition(".")[2] for part, is_in in named.items() if not is_in]
        if missing and any(named.values()):
            rule = f"{name} is one tensor, and {', '.join(missing)} is a part of it too."
            works = f"a value that selects {', '.join(missing)} as well, or no part of it"
            raise SettingError(f"{settings.node}.target_modules", _typed(settings.target_modules), rule, works)
        if all(named.values()) if named else whole:
            chosen.append(target)
    if not chosen:
        rule = "it excludes all weights that are selected."
        name = f"{settings.node}.exclude_modules"
        raise SettingError(name, _typed(settings.exclude_modules), rule, "a narrower pattern")
    return chosen


def _experts(model: nn.Module, plan: Mapping[str, int] | None) -> list[ExpertsInfo]:
    try:
        return find_experts(model, plan)
    except UnsupportedModelError:
        return []


def _linears(model: nn.Module, experts: Sequence[ExpertsInfo]) -> dict[str, Target]:
    """Return the linears of the layers.

    Subclasses of ``nn.Linear`` are left out, because they may compute otherwise, and so are routers: a linear beside
    the experts with an output for each, and what is in a module that families call ``gate`` or ``router``.
    """
    layers = tuple(f"{name}." for name in layer_names(model))
    routed = {info.fqn.rpartition(".")[0]: info.num_experts for info in experts}
    routers = tuple(f"{block}.{name}." for block in routed for name in ("gate", "router"))
    return {
        f"{fqn}.weight": Target(f"{fqn}.weight", module, "weight", None, False)
        for fqn, module in model.named_modules()
        if type(module) is nn.Linear
        and fqn.startswith(layers)
        and not f"{fqn}.".startswith(routers)
        and module.out_features != routed.get(fqn.rpartition(".")[0])
    }


def _is_read(model: nn.Module, name: str) -> bool:
    """Tell whether a family's code uses the weight of a linear without calling it, maybe for some kernels alone."""
    parent, _, own = name.removesuffix(".weight").rpartition(".")
    use = rf"\bself\.{own}\.weight\b(?!\.d(type|evice)\b)"
    return re.search(use, _code(type(model.get_submodule(parent)))) is not None


@functools.cache
def _code(kind: Any) -> str:
    """The source of a module's class, without comments; empty where there is none."""
    try:
        return re.sub("#.*", "", inspect.getsource(kind))
    except (OSError, TypeError):
        return ""


def _stacks(experts: Sequence[ExpertsInfo]) -> dict[str, Target]:
    """Return the weights of experts on transformers' interface; it is not known how others compute."""
    found = {}
    for info in experts:
        transposed: Any = getattr(info.module, "is_transposed", None)
        for own in ("gate_up_proj", "up_proj", "down_proj"):
            if transposed is not None and own in info.ep_dims:
                name = f"{info.fqn}.{own}"
                found[name] = Target(name, info.module, own, info.num_experts, transposed)
    return found


def _names_of(model: nn.Module, target: Target) -> list[str]:
    if target.experts is None:
        return [target.name.removesuffix(".weight")]
    shape = target.module.get_parameter(target.own).shape
    parts = revert(model, target.name, torch.empty((1, *shape[1:]), device="meta"))
    return [target.name, *(part.removesuffix(".weight") for part in parts if part != target.name)]


def _is_named(name: str, settings: LoraSettings) -> bool:
    wanted = settings.target_modules
    everything = isinstance(wanted, str) and wanted.lower() == _ALL
    return everything or _matches(name, wanted) or _matches(name, settings.target_parameters)


def _matches(name: str, wanted: str | Sequence[str]) -> bool:
    """Match a name as peft does: a string is a pattern for the whole name, entries of a list are suffixes."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(f".{name}".endswith(f".{entry.removesuffix('.weight')}") for entry in wanted)


def _check_entries(settings: LoraSettings, names: Mapping[str, Sequence[str]], read: Sequence[str]) -> None:
    """Check that each entry of the settings matches a weight.

    Args:
        read: linears that can't have an adapter, by name.

    Raises:
        SettingError: for the first that matches nothing.
    """
    everything = [own for of_one in names.values() for own in of_one]
    for key in ("target_modules", "target_parameters", "exclude_modules"):
        wanted = getattr(settings, key)
        if isinstance(wanted, str) and wanted.lower() == _ALL:
            continue
        for entry in [wanted] if isinstance(wanted, str) else [(entry,) for entry in wanted]:
            if not any(_matches(name, entry) for name in everything):
                said = entry if isinstance(entry, str) else entry[0]
                ends = sorted({name.rpartition(".")[2] for name in everything})
                near = close_matches(said, ends) or ends[:6]
                rule = f"{said} matches no linear of a layer and no weight of experts."
                if any(_matches(name, entry) for name in read):
                    rule = f"the family's code reads the weight of {said} without a call, so an adapter would not act."
                raise SettingError(f"{settings.node}.{key}", _typed(wanted), rule, f"{_ALL}, or some of {near}")
    if not settings.target_modules and not settings.target_parameters:
        rule = "neither this nor target_parameters selects a weight."
        raise SettingError(f"{settings.node}.target_modules", "null", rule, f"{settings.node}.target_modules={_ALL}")
