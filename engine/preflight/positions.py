"""Whether a rollout rotates queries and keys as the trainer does, where frequencies depend on a sequence's length."""

import math
from collections.abc import Mapping
from typing import Any

from ...rollout.layout.rollout_config import VLLM, server_arguments
from ..errors import SettingError
from ..model.families import SCALED_BY_LENGTH
from ..packing.positions import rotary_by_length, rotary_kinds
from ..settings.values import ACTOR_MODEL
from .model_facts import ModelFacts

__all__ = ["check_positions", "max_model_len"]

_LENGTH = "actor_rollout_ref.rollout.max_model_len"
_NAME = "actor_rollout_ref.rollout.name"


def max_model_len(rollout: Mapping[str, Any]) -> Any:
    """Return the tokens of a sequence that vLLM is started for; None for another server, or without any.

    0 stands for the model's ``max_position_embeddings``, which verl 0.9.1 takes where the setting is null.
    """
    if rollout.get("name") != "vllm":
        return None
    own = server_arguments(rollout).get("max_model_len")
    return (rollout.get("max_model_len") if own is None else own) or 0


def check_positions(rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Check that the rollout rotates as the trainer does, where frequencies depend on the length of a sequence.

    vLLM 0.24 to 0.29 chooses longrope's once, by its ``max_model_len``, and never changes those of dynamic NTK. SGLang
    0.5 chooses longrope's by the longest sequence under way, and has dynamic NTK's of the longest from the start.

    Raises:
        SettingError: for a length that the rollout computes otherwise, for the rollout, or for the model.
    """
    server = rollout.get("name")
    if facts is None or server not in ("vllm", "sglang"):
        return
    for module in rotary_by_length(facts.model):
        most = module.config.max_position_embeddings
        limit = max_model_len(rollout) if server == "vllm" else rollout.get("max_model_len") or most
        for layers, kind in rotary_kinds(module).items():
            if kind not in ("dynamic", "longrope"):
                continue
            parameters = module.config.rope_parameters
            parameters = parameters if layers is None else parameters[layers]
            if server == "vllm" and (not isinstance(limit, int) or not 0 <= limit <= most):
                rule = f"frequencies of {kind} depend on it, so it has to be a number, and vLLM has {most} positions."
                raise SettingError(f"{VLLM}.max_model_len", limit, rule, f"{_LENGTH}={most}, or less")
            if server == "sglang" and kind == "dynamic" and "alpha" not in parameters and parameters["factor"] != 1:
                rule = "SGLang has dynamic NTK's frequencies of the longest sequence for every sequence."
                raise SettingError(_NAME, server, rule, f"{_NAME}=vllm")
            if kind == "dynamic":
                continue
            original = parameters["original_max_position_embeddings"]
            if server == "sglang" and _longest(rollout, limit) > original:
                rule = f"SGLang has longrope's long frequencies for all sequences while one is over {original} tokens."
                raise SettingError(_LENGTH, limit, rule, f"{_LENGTH}={original}, or {_NAME}=vllm")
            _check_scale(module, layers, parameters, (limit or most) > original, facts)


def _longest(rollout: Mapping[str, Any], limit: int) -> int:
    lengths = [int(rollout.get(f"max_{part}_length") or 0) for part in ("prompt", "response")]
    return min(limit, sum(lengths)) if all(lengths) else limit


def _check_scale(
    module: Any, layers: str | None, parameters: Mapping[str, Any], is_long: bool, facts: ModelFacts
) -> None:
    """Check that longrope's rotations are scaled as in vLLM and SGLang, which read neither of transformers' keys."""
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
