"""Read verl's settings without omegaconf; the names of their nodes."""

from collections.abc import Mapping
from typing import Any

import torch

__all__ = [
    "ACTOR_MODEL",
    "CHECKPOINT_BACKEND",
    "DEFAULT_ATTENTION",
    "DTYPES",
    "OPTIMIZERS",
    "STRATEGY",
    "attention_of",
    "get_setting",
    "overrides_of",
    "plain",
]

STRATEGY = "epfsdp2"
ACTOR_MODEL = "actor_rollout_ref.model"
CHECKPOINT_BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
# Name of the optimizer's node, by the name of the model's.
OPTIMIZERS = {ACTOR_MODEL: "actor_rollout_ref.actor.optim", "critic.model": "critic.optim", "model": "optim"}
DEFAULT_ATTENTION = "flash_attention_2"  # verl 0.9.1, workers/config/model.py
# Names of dtypes in settings; float16 is for the compute alone.
DTYPES = {
    **{"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16},
    **{"fp16": torch.float16, "float16": torch.float16},
}


def overrides_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's overrides of the model's config, from either of the two places where verl accepts them."""
    overrides = plain(model.get("override_config") or {})
    return overrides.get("model_config", overrides)


def attention_of(model: Mapping[str, Any]) -> str:
    """Return the attention implementation that the run asks for, whatever the model's config.json says."""
    return str(overrides_of(model).get("attn_implementation", DEFAULT_ATTENTION))


def plain(value: Any) -> Any:
    """Convert omegaconf containers to dicts and lists, without importing omegaconf."""
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in value}
    if hasattr(value, "__iter__") and not isinstance(value, str | torch.Tensor):
        return [plain(item) for item in value]
    return value


def get_setting(node: Any, name: str, default: Any = None) -> Any:
    """Return a setting of one of verl's config nodes, mapping or dataclass, by its dotted name."""
    value = node
    for part in name.split("."):
        value = value.get(part, default) if isinstance(value, Mapping) else getattr(value, part, default)
    return value
