"""Models without experts: plain FSDP2, by the same recipe.

``engine.ep_size`` and the other settings of experts apply to roles whose model has experts. A role with a dense model
ignores them and logs one line. They are refused if no trained model has experts, because the user expects some.
"""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..config.settings import expert_settings
from ..errors import SettingError
from ..fsdp.fp32_modules import find_float32_modules, unmatched_patterns
from ..moe.find import find_experts
from .model_facts import ModelFacts, inspect_model

__all__ = ["check_alone", "not_applied", "without_experts"]

_REPLAY = "disabled"


def without_experts(engine: Any, model: nn.Module) -> Any:
    """Copy the engine's settings for a dense model, with the settings of experts at their defaults.

    Patterns of ``fp32_modules`` that match no module of the model (routers) are removed.
    """
    own = copy.copy(engine)
    vars(own).update(expert_settings())
    unmatched = unmatched_patterns(model, engine.fp32_modules)
    own.__dict__["fp32_modules"] = [pattern for pattern in engine.fp32_modules if pattern not in unmatched]
    own.__dict__["router_replay"] = copy.copy(engine.router_replay)
    own.router_replay.__dict__["mode"] = _REPLAY
    return own


def not_applied(engine: Any, path: str, model: nn.Module) -> str:
    """Format one line about the settings that do not apply to a model without experts; empty if none is set."""
    given = _given(engine)
    if unmatched := unmatched_patterns(model, engine.fp32_modules):
        given["engine.fp32_modules"] = unmatched
    if not given:
        return ""
    said = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"{path} has no experts: {said} {'do' if len(given) > 1 else 'does'} not apply, FSDP2 over all ranks"


def check_alone(engine: Any, facts: ModelFacts, setting: str, critic: Mapping[str, Any] | None = None) -> None:
    """Refuse settings of experts where no trained model has experts.

    Args:
        facts: facts of a dense model.
        setting: config path of its node.
        critic: model settings of the run's critic; None without one.

    Raises:
        SettingError: for the first such setting or unmatched pattern, if the critic has no experts either.
    """
    given = _given(engine)
    if not given and not unmatched_patterns(facts.model, engine.fp32_modules):
        return
    others = ""
    if critic is not None:
        beside = inspect_model(critic, "critic.model", engine.expert_plan)
        if beside is None or not beside.is_dense:
            return
        others = f", nor has that of the critic, {beside.name}"
    if engine.expert_plan:
        find_experts(facts.model, engine.expert_plan)  # raises with the parameters that its patterns may mean
    find_float32_modules(facts.model, [], engine.fp32_modules)
    name, value = next(iter(given.items()))
    rule = f"concerns experts, and {facts.name} ({setting}.path) is a dense model: it has none{others}."
    default = _REPLAY if name.endswith("mode") else expert_settings()[name.removeprefix("engine.")]
    raise SettingError(name, value, rule, f"{name}={default}, or leave it out: FSDP2 over all ranks")


def _given(engine: Any) -> dict[str, Any]:
    """Return the settings of experts that differ from their default, by full name."""
    found = {
        f"engine.{name}": value
        for name, default in expert_settings().items()
        if (value := getattr(engine, name)) not in (default, {})
    }
    if engine.router_replay.mode != _REPLAY:
        found["engine.router_replay.mode"] = engine.router_replay.mode
    return found
