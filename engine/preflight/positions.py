"""Checks that rollout and trainer use the same rotary embedding if its frequencies depend on the length."""

import math
from collections.abc import Mapping
from typing import Any

from ...rollout.servers import SERVERS, server_of
from ..config.values import ACTOR_MODEL
from ..errors import SettingError
from ..model.families import SCALED_BY_LENGTH
from ..packing.positions import rotary_by_length, rotary_kinds
from .model_facts import ModelFacts

__all__ = ["check_positions", "max_model_len"]


def max_model_len(rollout: Mapping[str, Any]) -> Any:
    """Return the sequence length by which a rollout chooses its frequencies at start (``longest_start``)."""
    return server_of(rollout).longest_start(rollout) if rollout.get("name") else None


def check_positions(rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Check that the rollout's rotary embedding equals the trainer's if frequencies depend on the length.

    Raises:
        SettingError: for a length at which they differ, for the rollout, or for the model.
    """
    if facts is None or rollout.get("name") not in SERVERS:
        return
    for module in rotary_by_length(facts.model):
        most = module.config.max_position_embeddings
        for layers, kind in rotary_kinds(module).items():
            if kind not in ("dynamic", "longrope"):
                continue
            parameters = module.config.rope_parameters
            parameters = parameters if layers is None else parameters[layers]
            length = server_of(rollout).check_rotations(kind, parameters, most, rollout)
            if kind == "longrope":
                is_long = length > parameters["original_max_position_embeddings"]
                _check_scale(module, layers, parameters, is_long, facts)


def _check_scale(
    module: Any, layers: str | None, parameters: Mapping[str, Any], is_long: bool, facts: ModelFacts
) -> None:
    """Check longrope's scale: rollouts ignore ``factor`` and ``attention_factor``, which transformers reads."""
    if type(module).__name__ in SCALED_BY_LENGTH:
        return
    original = parameters["original_max_position_embeddings"]
    times = module.config.max_position_embeddings / original
    scale = math.sqrt(1 + math.log(times) / math.log(original)) if times > 1 else 1.0
    scale = parameters.get("long_mscale" if is_long else "short_mscale", scale)
    own = getattr(module, "attention_scaling" if layers is None else f"{layers}_attention_scaling")
    if abs(own - scale) > 1e-6:
        rule = (
            f"transformers scales the rotations of its longrope by {own:.6g}, as attention_factor or factor say, and "
            f"the rollout, which reads max_position_embeddings or mscale, by {scale:.6g}."
        )
        raise SettingError(
            ACTOR_MODEL, facts.name, rule, f"a config.json with factor={times:g}, or without all of these"
        )
