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

__all__ = ["Target", "experts_of", "find_saved", "find_targets"]

_ALL = "all-linear"


@dataclass(frozen=True)
class Target:
    """A weight that gets an adapter.

    Args:
        own: name of the weight in its module.
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
        plan: ``engine.expert_plan``.

    Raises:
        SettingError: an entry matches no weight, or only a part of a stack.
    """
    experts = experts_of(model, plan)
    linears = _linears(model, experts)
    read = [name for name in linears if _is_read(model, name)]
    known = {name: target for name, target in linears.items() if name not in read} | _stacks(experts)
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
            raise settings.error("target_modules", rule, works)
        if all(named.values()) if named else whole:
            rank, alpha, scaling = settings.of_weight(name)
            chosen.append(replace(target, rank=rank, alpha=alpha, scaling=scaling))
    if not chosen and settings.layers_to_transform:
        rule, works = "these layers have none of the weights that are selected.", "layers_to_transform=null"
        raise settings.error("layers_to_transform", rule, f"{settings.node}.lora.{works}")
    if not chosen:
        raise settings.error("exclude_modules", "it excludes all weights that are selected.", "a narrower pattern")
    stacks = [target.name for target in chosen if target.experts is not None]
    if settings.use_dora and stacks:
        rule = f"peft has DoRA for linears alone, and {stacks[0]} is a stack of experts."
        works = f"{settings.node}.target_modules without experts, or use_dora=False"
        raise settings.error("use_dora", rule, works)
    return chosen


def find_saved(model: Any, settings: LoraSettings, plan: Mapping[str, int] | None = None) -> list[str]:
    """Find the modules that are trained whole, in the model's order.

    Raises:
        SettingError: an entry matches no module, or a module that a copy can't replace.
    """
    experts, found = experts_of(model, plan), set[str]()
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for entry in filter(None, (*settings.modules_to_save, settings.value_head)):
        named = {fqn: m for fqn, m in model.named_modules() if fqn.endswith(entry)}  # as peft matches them
        if not named:
            owning = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
            ends = sorted({fqn.rpartition(".")[2] for fqn in owning})
            near = close_matches(entry, ends) or ends[:6]
            raise settings.error("modules_to_save", f"{entry} names no module.", f"some of {near}")
        for fqn, module in named.items():
            if why := _why_not_saved(fqn, module, owners, experts):
                works = "modules without modules inside, such as lm_head, embed_tokens, norms and routers"
                raise settings.error("modules_to_save", f"{fqn} {why}.", works)
        found |= named.keys()
    return [fqn for fqn, _ in model.named_modules() if fqn in found]


def _why_not_saved(
    fqn: str, module: nn.Module, owners: Mapping[int, int], experts: Sequence[ExpertsInfo]
) -> str | None:
    """Return why a module can't be replaced by a trained copy in its own forward; None if it can.

    Args:
        owners: number of modules that have a parameter, by the parameter's id.
    """
    own = list(module.parameters(recurse=False))
    routed = {info.fqn.rpartition(".")[0]: info.num_experts for info in experts}
    is_router = type(module) is nn.Linear and module.out_features == routed.get(fqn.rpartition(".")[0])
    is_frozen = any(True for _ in module.buffers(recurse=False)) or not all(p.requires_grad for p in own)
    reasons = {
        "is a stack of experts, which adapters are for": any(module is info.module for info in experts),
        "has modules with weights inside, which are named instead": len(list(module.parameters())) > len(own),
        "has no weights": not own,
        "has values that are not trained, and peft would copy these too": is_frozen,
        "shares its weight with another module (tie_word_embeddings)": any(owners[id(p)] > 1 for p in own),
        "is a linear that its family may read without calling it": is_router,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


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


def experts_of(model: nn.Module, plan: Mapping[str, int] | None = None) -> list[ExpertsInfo]:
    """Return the experts of a model that can be dispatched; none of a dense model."""
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
                raise settings.error(key, rule, f"{_ALL}, or some of {near}")
    if settings.layers_to_transform and isinstance(settings.target_modules, str):
        rule = "narrows a list of target_modules down (peft), which here is a pattern."
        works = f"{settings.node}.target_modules=[q_proj,v_proj], or a pattern that names the layers"
        raise settings.error("layers_to_transform", rule, works)
    if not settings.target_modules and not settings.target_parameters:
        rule = "neither this nor target_parameters selects a weight."
        raise SettingError(f"{settings.node}.target_modules", "null", rule, f"{settings.node}.target_modules={_ALL}")
