"""What the ``optim`` settings ask for, checked on the driver before anything is started.

The fields are those of verl's ``FSDPOptimizerConfig``; anything that has them will do.
"""

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import SettingError
from .muon import Muon

__all__ = ["ACTOR_OPTIM", "adamw_arguments", "check_optimizer", "muon_arguments", "wants_muon"]

ACTOR_OPTIM = "actor_rollout_ref.actor.optim"
_TORCH = "torch.optim"
_OVERRIDES = "override_optimizer_config"
# lr and weight_decay are verl's own settings, one value for all parameters; a rate of AdamW's own is there for
# adjust_lr_fn=original, whose rates are other than AdamW's.
_MUON_OVERRIDES = ("momentum", "nesterov", "ns_steps", "ns_coefficients", "eps", "adjust_lr_fn", "ns_dtype", "adamw")
_ADAMW_OVERRIDES = ("lr", "eps", "amsgrad", "foreach", "fused")
# Of torch.optim, what can't train here: one calls its closure several times, the other takes sparse gradients.
_UNUSABLE = ("Optimizer", "LBFGS", "SparseAdam")


def wants_muon(config: Any) -> bool:
    """Whether matrices are to be orthogonalised by ``muon.Muon``, which takes the place of torch's unsharded one."""
    return _field(config, "optimizer") == "Muon" and _field(config, "optimizer_impl", _TORCH) == _TORCH


def muon_arguments(config: Any) -> dict[str, Any]:
    """Arguments of ``Muon``."""
    overrides = {key: value for key, value in _overrides(config).items() if key != "adamw"}
    return {"lr": _field(config, "lr"), "weight_decay": _field(config, "weight_decay"), **overrides}


def adamw_arguments(config: Any) -> dict[str, Any]:
    """Arguments of the AdamW that takes what is no matrix, beside Muon."""
    common = {"lr": _field(config, "lr"), "weight_decay": _field(config, "weight_decay")}
    return {**common, "betas": tuple(_field(config, "betas")), **_overrides(config).get("adamw", {})}


def check_optimizer(config: Any, setting: str = ACTOR_OPTIM) -> None:
    """Refuse an optimizer that there is not, and arguments that it does not take.

    Args:
        config: verl's ``optim`` settings of a role.
        setting: how the user calls their node.

    Raises:
        SettingError: naming what would work.
    """
    optimizer = _find(config, setting)
    overrides = _overrides(config)
    name = f"{setting}.{_OVERRIDES}"
    if wants_muon(config):
        _check_keys(overrides, _MUON_OVERRIDES, name, "Muon")
        rest = overrides.get("adamw", {})
        if not isinstance(rest, Mapping):
            rule = "holds what AdamW, which steps all that is no matrix, is built with."
            raise SettingError(f"{name}.adamw", rest, rule, f"{name}.adamw.eps=1e-8")
        _check_keys(rest, _ADAMW_OVERRIDES, f"{name}.adamw", "AdamW beside Muon")
        _try(torch.optim.AdamW, adamw_arguments(config), setting)
        _try(Muon, muon_arguments(config), setting)
        return
    parameters = inspect.signature(optimizer).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _check_keys(overrides, [p for p in parameters if p != "params"], name, optimizer.__name__)
    if _field(config, "optimizer_impl", _TORCH) == _TORCH:
        _try(optimizer, _arguments_by_verl(config), setting)


def _find(config: Any, setting: str) -> type[Optimizer]:
    """The class that ``optimizer`` of ``optimizer_impl`` names."""
    impl, wanted = str(_field(config, "optimizer_impl", _TORCH)), str(_field(config, "optimizer"))
    try:
        module = importlib.import_module(impl)
    except ImportError as error:
        rule = f"can't be imported: {error}."
        raise SettingError(f"{setting}.optimizer_impl", impl, rule, f"{setting}.optimizer_impl={_TORCH}") from error
    usable = sorted(
        name
        for name, member in vars(module).items()
        if inspect.isclass(member) and issubclass(member, Optimizer) and name not in _UNUSABLE
    )
    if wanted not in usable:
        rule = f"there is no such optimizer in {impl}."
        if wanted in _UNUSABLE and hasattr(module, wanted):
            rule = "this optimizer can't train a sharded model with dense gradients in one step."
        raise SettingError(f"{setting}.optimizer", wanted, rule, f"{setting}.optimizer={_near(wanted, usable)}")
    return getattr(module, wanted)


def _check_keys(given: Mapping[str, Any], known: Iterable[str], setting: str, taker: str) -> None:
    for key, value in given.items():
        if key not in known:
            works = f"{setting}.{_near(key, known)}=..."
            raise SettingError(f"{setting}.{key}", value, f"{taker} takes no such argument.", works)


def _try(optimizer: type[Optimizer], arguments: dict[str, Any], setting: str) -> None:
    """Build it for a small weight: torch checks its arguments itself."""
    try:
        optimizer([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        rule = f"{optimizer.__name__} does not take these arguments: {' '.join(str(error).split())}."
        defaults = {
            name: p.default
            for name, p in inspect.signature(optimizer).parameters.items()
            if name in arguments and p.default is not p.empty
        }
        raise SettingError(setting, arguments, rule, f"values like the defaults, {defaults}") from error


def _arguments_by_verl(config: Any) -> dict[str, Any]:
    """What verl's ``build_optimizer`` passes (0.9.1, ``workers/config/optimizer.py``)."""
    arguments = {"lr": _field(config, "lr"), "weight_decay": _field(config, "weight_decay")}
    name = str(_field(config, "optimizer")).lower()
    if "adam" in name or "ademamix" in name:
        arguments["betas"] = tuple(_field(config, "betas"))
    return {**arguments, **_overrides(config)}


def _near(wanted: str, known: Iterable[str]) -> str:
    """The closest of what there is, else all of it."""
    lower = {name.lower(): name for name in known}
    if wanted.lower() in lower:
        return lower[wanted.lower()]
    near = difflib.get_close_matches(wanted.lower(), lower, n=3, cutoff=0.5)
    names = [lower[n] for n in near] or list(lower.values())
    return names[0] if len(names) == 1 else f"one of {names}"


def _overrides(config: Any) -> dict[str, Any]:
    return _plain(_field(config, _OVERRIDES) or {})


def _plain(value: Any) -> Any:
    """omegaconf containers as dicts and tuples, without importing omegaconf."""
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in value}
    if hasattr(value, "__iter__") and not isinstance(value, (str, torch.Tensor)):
        return tuple(_plain(item) for item in value)
    return value


def _field(config: Any, name: str, default: Any = None) -> Any:
    return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)
