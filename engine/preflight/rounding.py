"""Checks of ``engine.rollout_quantization_aware``: training with weights as the rollout quantises them."""

from collections.abc import Mapping
from typing import Any

from ...rollout.layout.rollout_config import BLOCK
from ...rollout.servers import SERVERS, choose_mode, server_of
from ..errors import SettingError
from ..lora.settings import LoraSettings
from ..topology.mesh import Topology
from .model_facts import ModelFacts

__all__ = ["check_rounding", "check_rounding_alone", "rows_held_in"]

_SETTING = "engine.rollout_quantization_aware"
_OFF = f"{_SETTING}=False"
_NAME = "actor_rollout_ref.rollout.name"
_QUANTIZATION = "actor_rollout_ref.rollout.quantization"


def rows_held_in(rollout: Mapping[str, Any]) -> str:
    """Return the rollout's quantisation with per-row scales ('fp8', 'int8'), or '' (``rollout/layout/specs.py``)."""
    return server_of(rollout).rollout_of(rollout).channels


def check_rounding_alone(engine: Any, topology: Topology, model: Any, facts: ModelFacts | None, setting: str) -> None:
    """Run the checks that need no rollout: weights are sent without adapters, and no mesh cuts a block.

    Args:
        setting: config path of the model's node.

    Raises:
        SettingError: for adapters, for a mesh that cuts blocks, for a trainer without a rollout, or for a model with
            nothing to round.
    """
    asked = engine.rollout_quantization_aware
    if not asked:
        return
    if setting == "model" and not getattr(engine, "_of_a_role", False):
        raise SettingError(_SETTING, asked, "rounds as for a rollout, and this trainer has none.", _OFF)
    if LoraSettings.of(model, setting) is not None:
        rule = "a rollout rounds weights with their adapters merged, and a trainer keeps the two apart."
        raise SettingError(_SETTING, asked, rule, f"{_OFF}, or {setting}.lora_rank=0")
    if facts is None:
        return
    if asked == "experts" and facts.is_dense:
        raise SettingError(_SETTING, asked, f"{facts.name} has no experts.", f"{_SETTING}=True, or {_OFF}")
    has_rows = getattr(engine, "_rollout_channels", "") != ""
    if topology.etp > 1 and has_rows and not facts.is_dense:
        rule = f"weights are rounded by rows, and engine.etp_size={topology.etp} cuts those of experts."
        raise SettingError(_SETTING, asked, rule, f"{_OFF}, or engine.etp_size=1")
    inner = getattr(facts.model.config.get_text_config(), "moe_intermediate_size", None)
    if topology.etp > 1 and inner and inner % (topology.etp * BLOCK):
        rule = (
            f"weights are rounded by blocks of {BLOCK} rows, and engine.etp_size={topology.etp} cuts the {inner} of an "
            "expert inside of one."
        )
        raise SettingError(_SETTING, asked, rule, f"{_OFF}, or engine.etp_size=1")


def check_rounding(engine: Any, rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Check that the trainer quantises the weights that it sends to the run's rollout.

    Raises:
        SettingError: with the first setting that prevents this.
    """
    asked = engine.rollout_quantization_aware
    if not asked:
        return
    server, able = server_of(rollout), " or ".join(one.title for one in SERVERS.values() if one.quantised)
    works = f"{_QUANTIZATION}=fp8 with a {able} that takes slices, or {_OFF}"
    if not server.rollout_of(rollout).is_quantised:
        found = f"{_QUANTIZATION}={rollout.get('quantization')}" if server.quantised else f"{_NAME}={server.name}"
        rule = f"weights are rounded as they are for a {able} in FP8 or INT8, and {found}."
        raise SettingError(_SETTING, asked, rule, works)
    family = None if facts is None else facts.model.config.model_type
    backend = rollout.get("backend") or "naive"
    mode, reason = choose_mode(engine.rollout_sync, rollout, family, backend=backend)
    if mode != "sliced":
        why = (
            reason or f"engine.rollout_sync={engine.rollout_sync} has {server.title}'s workers quantise whole tensors."
        )
        raise SettingError(_SETTING, asked, f"weights are rounded as slices of them are sent. {why}", works)
