"""Check verl's ``optim`` settings on the driver, and convert them to arguments of optimizers.

A config is verl's ``FSDPOptimizerConfig``, or a mapping or object with its fields.
"""

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..config.values import get_setting, plain
from ..errors import SettingError, close_matches
from .muon import Muon
from .shard_trial import why_not_sharded

__all__ = ["adamw_arguments", "check_optimizer", "muon_arguments", "wants_muon"]

_TORCH = "torch.optim"
_OVERRIDES = "override_optimizer_config"
# No lr and weight_decay, which are settings of verl, for all parameters. adamw.lr exists because adjust_lr_fn=original
# needs another learning rate than AdamW.
_MUON_OVERRIDES = ("momentum", "nesterov", "ns_steps", "ns_coefficients", "eps", "adjust_lr_fn", "ns_dtype", "adamw")
_ADAMW_OVERRIDES = ("lr", "eps", "amsgrad", "foreach", "fused")
_TRIAL_RATE = 0.1  # at a run's 1e-6, steps would differ by less than the tolerance


def wants_muon(config: Any) -> bool:
    """Whether the settings choose Muon of ``torch.optim``, which ``muon.Muon`` replaces."""
    return get_setting(config, "optimizer") == "Muon" and get_setting(config, "optimizer_impl", _TORCH) == _TORCH


def muon_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments of ``Muon``."""
    overrides = {key: value for key, value in _overrides(config).items() if key != "adamw"}
    return {"lr": get_setting(config, "lr"), "weight_decay": get_setting(config, "weight_decay"), **overrides}


def adamw_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments of AdamW for the parameters that Muon does not step."""
    common = {"lr": get_setting(config, "lr"), "weight_decay": get_setting(config, "weight_decay")}
    return {**common, "betas": tuple(get_setting(config, "betas")), **_overrides(config).get("adamw", {})}


def check_optimizer(config: Any, setting: str, device: str = "cuda") -> None:
    """Check that the optimizer exists, accepts its arguments, and steps sharded weights like whole ones.

    Args:
        config: verl's ``optim`` settings of a role, whose node is ``setting``.

    Raises:
        SettingError: with a value that would work.
    """
    optimizer = _find(config, setting)
    overrides = _overrides(config)
    name = f"{setting}.{_OVERRIDES}"
    if wants_muon(config):
        _check_keys(overrides, _MUON_OVERRIDES, name, "Muon")
        rest = overrides.get("adamw", {})
        if not isinstance(rest, Mapping):
            rule = "has to be a mapping of arguments of AdamW, which steps all parameters that are not matrices."
            raise SettingError(f"{name}.adamw", rest, rule, f"{name}.adamw.eps=1e-8")
        _check_keys(rest, _ADAMW_OVERRIDES, f"{name}.adamw", "AdamW beside Muon")
        _try(torch.optim.AdamW, adamw_arguments(config), setting)
        _try(Muon, muon_arguments(config), setting)
        return
    arguments = _arguments_by_verl(config)
    parameters = inspect.signature(optimizer).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _check_keys(overrides, [p for p in parameters if p != "params"], name, optimizer.__name__)
        if lacking := [key for key in arguments if key not in parameters]:
            rule = f"verl passes {lacking[0]} to every optimizer, and this one takes none."
            raise SettingError(f"{setting}.optimizer", optimizer.__name__, rule, f"{setting}.optimizer=AdamW")
    if get_setting(config, "optimizer_impl", _TORCH) == _TORCH:
        _try(optimizer, arguments, setting)
    _check_sharded(optimizer, arguments, overrides, setting, device)


def _check_sharded(
    optimizer: type[Optimizer], arguments: dict[str, Any], overrides: dict[str, Any], setting: str, device: str
) -> None:
    """Refuse an optimizer that can't step sharded weights and be saved (``shard_trial.py``)."""
    tried = {**arguments, "lr": _TRIAL_RATE}
    if device != "cpu":
        tried.pop("capturable", None)  # an option for CUDA graphs, which a CPU lacks; changes no result
    try:
        reason = why_not_sharded(lambda params: optimizer(params, **tried))
    except Exception as error:
        if not optimizer.__module__.startswith("torch.") and not isinstance(error, (TypeError, ValueError)):
            return  # It may need a GPU, which the driver lacks.
        reason = f"it raises {type(error).__name__}: {' '.join(str(error).split())}"
    if reason is not None:
        value = f"{optimizer.__name__} with {overrides}" if overrides else optimizer.__name__
        works = f"{setting}.optimizer=AdamW" + (f" with {setting}.{_OVERRIDES}=null" if overrides else "")
        raise SettingError(f"{setting}.optimizer", value, f"{reason.rstrip('.')}.", works)


def _find(config: Any, setting: str) -> type[Optimizer]:
    """Return the class that ``optimizer`` names in the module ``optimizer_impl``."""
    impl, wanted = str(get_setting(config, "optimizer_impl", _TORCH)), str(get_setting(config, "optimizer"))
    try:
        module = importlib.import_module(impl)
    except ImportError as error:
        rule = f"can't be imported: {error}."
        raise SettingError(f"{setting}.optimizer_impl", impl, rule, f"{setting}.optimizer_impl={_TORCH}") from error
    usable = sorted(
        name
        for name, member in vars(module).items()
        if inspect.isclass(member) and issubclass(member, Optimizer) and member is not Optimizer
    )
    if wanted not in usable:
        rule = f"{impl} has no such optimizer."
        raise SettingError(f"{setting}.optimizer", wanted, rule, f"{setting}.optimizer={_near(wanted, usable)}")
    return getattr(module, wanted)


def _check_keys(given: Mapping[str, Any], known: Iterable[str], setting: str, taker: str) -> None:
    for key, value in given.items():
        if key not in known:
            works = f"{setting}.{_near(key, known)}=..."
            raise SettingError(f"{setting}.{key}", value, f"{taker} takes no such argument.", works)


def _try(optimizer: type[Optimizer], arguments: dict[str, Any], setting: str) -> None:
    """Build the optimizer for a small weight, because torch then checks the arguments."""
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
    """Return the arguments that verl's ``build_optimizer`` passes (0.9.1, ``workers/config/optimizer.py``)."""
    arguments = {"lr": get_setting(config, "lr"), "weight_decay": get_setting(config, "weight_decay")}
    name = str(get_setting(config, "optimizer")).lower()
    if "adam" in name or "ademamix" in name:
        arguments["betas"] = tuple(get_setting(config, "betas"))
    return {**arguments, **_overrides(config)}


def _near(wanted: str, known: Iterable[str]) -> str:
    """Format the known names that are similar to ``wanted``, or all if none is."""
    lower = {name.lower(): name for name in known}
    if wanted.lower() in lower:
        return lower[wanted.lower()]
    names = close_matches(wanted, known, cutoff=0.5) or list(lower.values())
    return names[0] if len(names) == 1 else f"one of {names}"


def _overrides(config: Any) -> dict[str, Any]:
    return plain(get_setting(config, _OVERRIDES) or {})
