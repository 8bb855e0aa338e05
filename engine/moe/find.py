"""Find the experts modules of a Hugging Face model by their interface, not by their names.

transformers decorates every experts class that a registered function can compute
(``transformers.integrations.moe.use_experts_implementation``). Its instances carry ``has_gate``, ``has_bias`` and
``is_transposed``, and stack their weights along dim 0, one slice per expert.

``engine.expert_plan`` describes a user's own model whose experts are not on that interface: patterns of parameter
names, each with the dim that counts the experts. Such a module computes its local experts itself (``CustomExperts``).

A model is dense only if no class or attribute is called experts, no weights are stacked, and its config has no number
of experts. Any other model without known experts is refused, because an unsupported Mixture-of-Experts would
silently be trained without expert parallelism.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..errors import SettingError, close_matches
from ..topology.expert_placement import EtpDim, check_inner_divides
from ..topology.mesh import Topology

__all__ = [
    "CustomExperts",
    "ExpertsInfo",
    "UnsupportedModelError",
    "check_etp",
    "experts_by_layer",
    "find_experts",
    "is_dense",
    "is_interleaved",
    "is_on_interface",
]

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?:\.|$)")
_INTERFACE_FLAGS = ("has_gate", "has_bias", "is_transposed")
# In class names of experts outside transformers' experts interface (5.9: llama4, longcat_flash, granitemoe*, jetmoe,
# dbrx, aria, switch_transformers, nllb_moe, doge). They only give the reason of a refusal.
_OUTSIDE_MARKS = ("expert", "moe", "groupedgemm")
# Config keys for the number of experts of a layer (transformers 5.9: num_experts, num_local_experts, n_routed_experts,
# moe_num_experts, zero_expert_num), without those for the experts per token.
_COUNT = re.compile(r"(?:^|_)(?:num|n)_(?:\w+_)?experts$|(?:^|_)experts?_(?:num|count)$|(?:^|_)num_expert$")


class UnsupportedModelError(ValueError):
    """The model has experts that this engine can't shard, or a setting that it can't run with."""


@runtime_checkable
class CustomExperts(Protocol):
    """An experts module outside transformers' interface that can compute with a part of its experts.

    In its forward, the parameters of ``engine.expert_plan`` are DTensors over ``ep``, and ``to_local()`` returns this
    rank's experts. It sends tokens to their experts and back with ``moe.dispatch.dispatch`` and ``combine``.
    """

    def set_expert_parallel(self, expert_parallel: Any) -> None:
        """Store a ``moe.forward.ExpertsRuntime``; called once, before the first forward."""


@dataclass(frozen=True)
class ExpertsInfo:
    """One experts module of a model."""

    fqn: str
    module: nn.Module
    num_experts: int
    ep_dims: Mapping[str, int]
    """Parameter name in the module -> its dim that counts the experts; parameters without one are left out."""

    @property
    def block(self) -> str:
        """Name in the model of the block that calls the experts."""
        return self.fqn.rpartition(".")[0]

    @property
    def etp_dims(self) -> dict[str, EtpDim]:
        """Parameter name in the module -> its dim that expert tensor parallelism shards; none for custom experts.

        It is the inner dim of both linears, so that a rank's outputs are a summand. The bias of the outputs has no
        inner dim and is sharded along the hidden one: each rank adds its part. One half of an adapter has the inner
        dim; the other is sharded along the hidden one, and gathered.
        """
        module: Any = self.module
        if not is_on_interface(module):
            return {}
        parts = 2 if module.has_gate and not is_interleaved(module) else 1
        outputs, inputs = (2, 1) if module.is_transposed else (1, 2)
        up = "gate_up_proj" if module.has_gate else "up_proj"
        known = {
            up: EtpDim(outputs, parts),
            f"{up}_bias": EtpDim(1, parts),
            "down_proj": EtpDim(inputs),
            "down_proj_bias": EtpDim(1),
            f"{up}_lora_A": EtpDim(2),
            f"{up}_lora_B": EtpDim(1, parts),
            "down_proj_lora_A": EtpDim(2),
            "down_proj_lora_B": EtpDim(1),
        }
        return {name: known[name] for name in self.ep_dims if name in known}


def find_experts(model: nn.Module, plan: Mapping[str, int] | None = None) -> list[ExpertsInfo]:
    """Find all experts modules, in the model's order; none in a dense model.

    Args:
        plan: ``engine.expert_plan``, for experts outside the interface: pattern of a parameter's FQN (``*`` matches
            anything) -> the dim that counts the experts. It has precedence for the modules of these parameters.

    Raises:
        UnsupportedModelError: none is found in a model that seems to have experts.
        SettingError: the plan names no parameter, or parameters that can't be split over experts.
    """
    planned = _planned(model, plan or {})
    found = [planned.get(fqn) or _on_interface(fqn, m) for fqn, m in model.named_modules()]
    experts = [info for info in found if info is not None]
    for info in experts:
        # All ranks hold such parameters, but an experts module reduces gradients only among ranks that share experts.
        others = [name for name, p in info.module.named_parameters() if p.requires_grad and name not in info.ep_dims]
        if others:
            raise SettingError(
                "engine.expert_plan",
                {f"{info.fqn}.{name}": dim for name, dim in info.ep_dims.items()},
                f"{type(info.module).__name__} has parameters without a dim for its experts: {', '.join(others[:4])}.",
                "a module that only holds parameters with an experts dim; move the rest to its parent",
            )
    if not experts:
        _check_dense(model)
    return experts


def is_dense(model: nn.Module, plan: Mapping[str, int] | None = None) -> bool:
    """Whether a model has no experts, and no parameter of the plan, which may be for another role's model.

    Raises:
        UnsupportedModelError: as ``find_experts``.
    """
    names = [name for name, _ in model.named_parameters()]
    if any(fnmatchcase(name, pattern) for pattern in plan or () for name in names):
        return False
    return not find_experts(model)


def _check_dense(model: Any) -> None:
    """Raise ``UnsupportedModelError`` if a model's classes, config or weights look like experts."""
    name, interface = type(model).__name__, "transformers' experts interface (ALL_EXPERTS_FUNCTIONS)"
    if outside := _looks_like_experts(model):
        raise UnsupportedModelError(
            f"{name} keeps its experts in {', '.join(outside[:4])}, outside {interface}, so they can't be dispatched."
        )
    if counted := _counts_of_experts(model.config.to_dict() if hasattr(model, "config") else {}):
        counts = ", ".join(f"{key}={value}" for key, value in list(counted.items())[:3])
        raise UnsupportedModelError(
            f"the config of {name} says {counts}, but none of its modules holds experts on {interface}. If the model "
            "has none, the config should not say so (override_config)."
        )
    # Parameters of three or more dims, the first larger than one, except those of convolutions.
    stacked = [
        f"{fqn}.{own} {tuple(param.shape)}"
        for fqn, module in model.named_modules()
        if not isinstance(module, nn.modules.conv._ConvNd)
        for own, param in module.named_parameters(recurse=False)
        if param.dim() > 2 and param.shape[0] > 1
    ]
    if stacked:
        raise UnsupportedModelError(
            f"{name} stacks the weights {', '.join(stacked[:3])}, which may be those of experts outside {interface}."
        )


def experts_by_layer(experts: Sequence[ExpertsInfo], num_layers: int) -> dict[int, ExpertsInfo]:
    """Map the index of each layer to its experts; router losses and router replay need this.

    Raises:
        UnsupportedModelError: a layer has two experts modules, no number in its name, custom experts, or several runs
            in a forward.
    """
    found: dict[int, ExpertsInfo] = {}
    by_number = "experts are identified by the number of their layer, and"
    for info in experts:
        passes = getattr(getattr(info.module, "config", None), "loop_num_passes", 1)  # Inkling2-Loop
        if passes > 1:
            raise UnsupportedModelError(f"layers run {passes} times in a forward, and route a token each time.")
        numbers = _LAYER.findall(info.fqn)
        index = int(numbers[-1]) if numbers else -1
        if not 0 <= index < num_layers:
            raise UnsupportedModelError(f"{by_number} {info.fqn} has none.")
        if index in found:
            raise UnsupportedModelError(f"{by_number} both {found[index].fqn} and {info.fqn} are in it.")
        if isinstance(info.module, CustomExperts):
            raise UnsupportedModelError(f"{info.fqn} computes its experts itself, so their inputs are not known.")
        found[index] = info
    return found


def _on_interface(fqn: str, module: nn.Module) -> ExpertsInfo | None:
    """Describe a module on transformers' interface whose own 3-D weights agree on the number of experts."""
    if not is_on_interface(module):
        return None
    if getattr(module, "has_post_expert_norm", False):  # transformers >= 5.10
        raise UnsupportedModelError(
            f"{fqn} ({type(module).__name__}) has post_expert_norm, a norm of each expert's output before the routing "
            "weights are applied (has_post_expert_norm of transformers' experts interface), which this engine does not "
            "compute."
        )
    own = dict(module.named_parameters(recurse=False))
    counts = [p.shape[0] for p in own.values() if p.dim() == 3]
    if len(counts) < 2 or len(set(counts)) != 1:
        return None
    return ExpertsInfo(fqn, module, counts[0], {name: 0 for name, p in own.items() if p.shape[0] == counts[0]})


def is_on_interface(module: nn.Module) -> bool:
    """Whether a module's class is on transformers' experts interface."""
    return all(hasattr(module, flag) for flag in _INTERFACE_FLAGS)


def is_interleaved(experts: Any) -> bool:
    """Whether gate and up are interleaved in the columns of ``_apply_gate``'s input.

    This calls the function: transformers had interleaved families before it had the flag ``is_concatenated``.
    """
    columns = torch.tensor([[0.5, 0.6, 0.7, 0.8], [0.5, 0.3, 0.7, 0.8]], device="cpu")
    # The two rows differ in the second column: the first output's up if they are interleaved, else another gate.
    first, other = experts._apply_gate(columns)[:, 0].tolist()
    return first != other


def _planned(model: nn.Module, plan: Mapping[str, int]) -> dict[str, ExpertsInfo]:
    """Describe the modules of the user's plan, by their FQN."""
    params = dict(model.named_parameters())
    dims: dict[str, dict[str, int]] = {}
    for pattern, dim in plan.items():
        names = [name for name in params if fnmatchcase(name, pattern)]
        if not names:
            near = close_matches(pattern, params)
            raise SettingError("engine.expert_plan", pattern, "matches no parameter of the model.", f"one like {near}")
        for name in names:
            shape = tuple(params[name].shape)
            if isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim < len(shape):
                rule = f"has to be the dim of {name}, of shape {shape}, that counts the experts."
                works = f"one of {list(range(len(shape)))}"
                raise SettingError(f"engine.expert_plan.{pattern}", dim, rule, works)
            module, _, own = name.rpartition(".")
            dims.setdefault(module, {})[own] = dim
    return {fqn: _planned_module(fqn, model.get_submodule(fqn), ep_dims) for fqn, ep_dims in dims.items()}


def check_etp(experts: Sequence[ExpertsInfo], topology: Topology, model: str) -> None:
    """Check that experts of the model with this name can be sharded over ``etp``.

    Raises:
        SettingError: it has none, its experts are custom ones, or the size does not divide their inner dims.
    """
    for info in experts if topology.etp > 1 else ():
        unknown = [name for name in info.ep_dims if name not in info.etp_dims]
        if unknown:
            rule = (
                f"it is not known how to cut {info.fqn}.{unknown[0]}: experts are cut that are the two linears of "
                "transformers' interface, and their adapters."
            )
            raise SettingError("engine.etp_size", topology.etp, rule, "engine.etp_size=1")
    sizes = [i.module.get_parameter(n).shape[d.dim] // d.parts for i in experts for n, d in i.etp_dims.items()]
    check_inner_divides(sizes, topology, model)


def _planned_module(fqn: str, module: nn.Module, ep_dims: Mapping[str, int]) -> ExpertsInfo:
    counts = {name: module.get_parameter(name).shape[dim] for name, dim in ep_dims.items()}
    if len(set(counts.values())) != 1:
        rule = f"the parameters of {fqn} disagree on the number of experts."
        raise SettingError("engine.expert_plan", counts, rule, "the dim of each that counts the experts")
    if not is_on_interface(module) and not isinstance(module, CustomExperts):
        raise SettingError(
            "engine.expert_plan",
            fqn,
            f"{type(module).__name__} is not on transformers' experts interface, and has no method "
            "set_expert_parallel that would tell it which experts it holds.",
            "decorate the class with transformers.integrations.moe.use_experts_implementation, or give it that method "
            "(engine/moe/find.py, CustomExperts)",
        )
    if is_on_interface(module) and set(ep_dims.values()) != {0}:
        rule = f"{type(module).__name__} is on transformers' experts interface, which stacks experts along dim 0."
        raise SettingError("engine.expert_plan", dict(ep_dims), rule, "dim 0, or leave the module out of the plan")
    return ExpertsInfo(fqn, module, next(iter(counts.values())), dict(ep_dims))


def _looks_like_experts(model: nn.Module) -> list[str]:
    """Return classes whose names, without the family's prefix (GraniteMoe...), contain experts or MoE; if there are
    none, modules whose attribute contains expert."""
    family = type(model).__name__
    names = {type(m).__name__ for m in model.modules()} - {family}
    own = {name: name.removeprefix(os.path.commonprefix([name, family])).lower() for name in names}
    classes = sorted(name for name, part in own.items() if any(mark in part for mark in _OUTSIDE_MARKS))
    attributes = {fqn for fqn, _ in model.named_modules() if "expert" in fqn.rpartition(".")[2].lower()}
    return classes or sorted(attributes)


def _counts_of_experts(config: Mapping[Any, Any], node: str = "") -> dict[str, Any]:
    """Return the keys of a config, and of configs inside it, that give a number of experts above one."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _counts_of_experts(value, f"{node}{key}.")
        elif _COUNT.search(str(key)):
            counts = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(count, int) and count > 1 for count in counts):
                found[f"{node}{key}"] = value
    return found
