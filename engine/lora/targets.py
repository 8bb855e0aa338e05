"""Find the weights that LoRA settings select, and the modules that are trained whole."""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import SettingError, close_matches
from ..model.hf_convert import revert
from ..model.layers import layer_names
from ..moe.find import ExpertsInfo, UnsupportedModelError, find_experts
from .settings import LoraSettings

__all__ = ["Target", "find_saved", "find_targets", "has_experts"]

_ALL = "all-linear"
_LAYERS = "{}.lora.layers_to_transform"


def _typed(names: str | tuple[str, ...]) -> str | list[str]:
    return names if isinstance(names, str) else list(names)


@dataclass(frozen=True)
class Target:
    """A weight that gets an adapter.

    Args:
        name: name of the weight in the model.
        module: the module that owns the weight.
        own: name of the weight in the module.
        experts: number of stacked experts; None for the weight of a linear.
        is_transposed: whether the weight is stored ``[..., in, out]``.
        rank, alpha, scaling: the adapter's.
    """

    name: str
    module: nn.Module
    own: str
    experts: int | None
    is_transposed: bool
    rank: int = 0
    alpha: float = 0.0
    scaling: float = 0.0

    @property
    def sizes(self) -> tuple[int, int]:
        """``(in, out)`` of the linear map."""
        first, second = self.module.get_parameter(self.own).shape[-2:]
        return (first, second) if self.is_transposed else (second, first)


def find_targets(model: nn.Module, settings: LoraSettings, plan: Mapping[str, int] | None = None) -> list[Target]:
    """Find the weights that the settings select: linears, then stacks of experts, in the model's order.

    Linears of layers match by name. Stacks of experts match by their name, and by the names of their tensors in a
    checkpoint (``gate_proj`` and ``up_proj``). Heads, embeddings and routers never match. Neither do linears whose
    weight the family's code reads without a call (Mamba's ``out_proj``), because an adapter acts in the call.

    Args:
        model: a model that is not sharded yet.
        plan: ``engine.expert_plan``.

    Raises:
        SettingError: an entry matches no weight, or only a part of a stack.
    """
    experts = _experts(model, plan)
    linears = _linears(model, experts)
    read = [name for name in linears if _is_read(model, name)]
    known = {**{name: target for name, target in linears.items() if name not in read}, **_stacks(experts)}
    names = {name: _names_of(model, target) for name, target in known.items()}
    _check_entries(settings, names, [name.removesuffix(".weight") for name in read])
    chosen = []
    for name, target in known.items():
        # The model's name selects the whole weight, each name of a checkpoint one part.
        own, *parts = names[name]
        if _matches(own, settings.exclude_modules) or _is_saved(own, settings) or not _is_in_layers(own, settings):
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
            chosen.append(_with_adapter(target, settings))
    if not chosen:
        rule = "it excludes all weights that are selected."
        name = f"{settings.node}.exclude_modules"
        if settings.layers_to_transform:
            rule, name = "these layers have none of the weights that are selected.", _LAYERS.format(settings.node)
            raise SettingError(name, list(settings.layers_to_transform), rule, f"{name}=null")
        raise SettingError(name, _typed(settings.exclude_modules), rule, "a narrower pattern")
    _check_dora(settings, chosen)
    return chosen


def find_saved(model: Any, settings: LoraSettings, plan: Mapping[str, int] | None = None) -> list[str]:
    """Find the modules that are trained whole, in the model's order.

    Args:
        model, plan: see ``find_targets``.

    Raises:
        SettingError: an entry matches no module, or a module that a copy can't replace.
    """
    setting, found = f"{settings.node}.lora.modules_to_save", dict[str, nn.Module]()
    experts = _experts(model, plan)
    stacked = {info.module for info in experts}
    owners = Counter(id(p) for module in model.modules() for p in _own_parameters(module))
    for entry in (*settings.modules_to_save, *filter(None, [settings.value_head])):
        named = {fqn: m for fqn, m in model.named_modules() if fqn.endswith(entry)}  # as peft matches them
        if not named:
            ends = sorted({fqn.rpartition(".")[2] for fqn, m in model.named_modules() if _own_parameters(m)})
            near = close_matches(entry, ends) or ends[:6]
            raise SettingError(setting, list(settings.modules_to_save), f"{entry} names no module.", f"some of {near}")
        for fqn, module in named.items():
            why = _why_not_saved(fqn, module, owners, stacked, experts)
            if why:
                works = "modules without modules inside, such as lm_head, embed_tokens, norms and routers"
                raise SettingError(setting, list(settings.modules_to_save), f"{fqn} {why}.", works)
            found[fqn] = module
    return [fqn for fqn, _ in model.named_modules() if fqn in found]


def _why_not_saved(
    fqn: str, module: nn.Module, owners: Mapping[int, int], stacked: set[nn.Module], experts: Sequence[ExpertsInfo]
) -> str:
    """Return why a module can't be replaced by a trained copy in its own forward; empty if it can.

    Args:
        owners: number of modules that have a parameter, by the parameter's id.
    """
    if module in stacked:
        return "is a stack of experts, which adapters are for"
    if any(_own_parameters(child) for child in module.modules() if child is not module):
        return "has modules with weights inside, which are named instead"
    if not _own_parameters(module):
        return "has no weights"
    if list(module.buffers(recurse=False)) or not all(p.requires_grad for p in _own_parameters(module)):
        return "has values that are not trained, and peft would copy these too"
    if any(owners[id(p)] > 1 for p in _own_parameters(module)):
        return "shares its weight with another module (tie_word_embeddings)"
    routed = {info.fqn.rpartition(".")[0]: info.num_experts for info in experts}
    if type(module) is nn.Linear and module.out_features == routed.get(fqn.rpartition(".")[0]):
        return "is a linear that its family may read without calling it"
    return ""


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _with_adapter(target: Target, settings: LoraSettings) -> Target:
    name = target.name
    alpha, scaling = settings.alpha_of(name), settings.scaling_of(name)
    return replace(target, rank=settings.rank_of(name), alpha=alpha, scaling=scaling)


def _check_dora(settings: LoraSettings, chosen: Sequence[Target]) -> None:
    stack = next((target.name for target in chosen if target.experts is not None), None)
    if settings.use_dora and stack is not None:
        rule = f"peft has DoRA for linears alone, and {stack} is a stack of experts."
        works = f"{settings.node}.target_modules without experts, or use_dora=False"
        raise SettingError(f"{settings.node}.lora.use_dora", True, rule, works)


def _is_saved(name: str, settings: LoraSettings) -> bool:
    """Whether a module is trained whole, and so gets no adapter, as in peft."""
    return any(re.match(rf"(^|.*\.){re.escape(entry)}($|\..*)", name) for entry in settings.modules_to_save)


def _is_in_layers(name: str, settings: LoraSettings) -> bool:
    """Whether a weight is in ``layers_to_transform``, by the first layer index in its name."""
    if not settings.layers_to_transform:
        return True
    lists = "|".join(settings.layers_pattern) or r"[^.]*"
    found = re.match(rf"(?:.*?\.)?(?:{lists})\.(\d+)\.", name)
    return found is not None and int(found[1]) in settings.layers_to_transform


def has_experts(model: nn.Module, plan: Mapping[str, int] | None = None) -> bool:
    """Whether a model has experts that can be dispatched."""
    return bool(_experts(model, plan))


def _experts(model: nn.Module, plan: Mapping[str, int] | None) -> list[ExpertsInfo]:
    try:
        return find_experts(model, plan)
    except UnsupportedModelError:
        return []


def _linears(model: nn.Module, experts: Sequence[ExpertsInfo]) -> dict[str, Target]:
    """Return the linears of the layers.

    Subclasses of ``nn.Linear`` are left out, because they may have a forward of their own. So are routers: linears
    beside the experts with one output per expert, and linears in a module ``gate`` or ``router``.
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
    """Whether a family's code reads the weight of a linear without a call, maybe for some kernels alone."""
    parent, _, own = name.removesuffix(".weight").rpartition(".")
    use = rf"\bself\.{own}\.weight\b(?!\.d(type|evice)\b)"
    kind: Any = type(model.get_submodule(parent))
    return re.search(use, _code(kind)) is not None


@functools.cache
def _code(kind: Any) -> str:
    """Return the source of a module's class without comments; empty if it is not available."""
    try:
        return re.sub("#.*", "", inspect.getsource(kind))
    except (OSError, TypeError):
        return ""


def _stacks(experts: Sequence[ExpertsInfo]) -> dict[str, Target]:
    """Return the weights of experts on transformers' interface; the computation of other experts is unknown."""
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
        SettingError: names the first entry without a match.
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
    if settings.layers_to_transform and isinstance(settings.target_modules, str):
        rule = "narrows a list of target_modules down (peft), which here is a pattern."
        works = f"{settings.node}.target_modules=[q_proj,v_proj], or a pattern that names the layers"
        raise SettingError(_LAYERS.format(settings.node), list(settings.layers_to_transform), rule, works)
    if not settings.target_modules and not settings.target_parameters:
        rule = "neither this nor target_parameters selects a weight."
        raise SettingError(f"{settings.node}.target_modules", "null", rule, f"{settings.node}.target_modules={_ALL}")
