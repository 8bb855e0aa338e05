"""A tiny model of every family whose layout in vLLM is known, as a config; nothing is square."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.models import save_random

__all__ = ["FAMILIES", "Family", "config_of", "model_on_meta", "save"]


@dataclass(frozen=True)
class Family:
    """How to make one.

    Args:
        config: class in transformers.
        sizes: arguments of it, beside those that all have.
        served_as: what of the config vLLM's CPU build can't run is something else there; no layout depends on it.
        may_be_tied: whether vLLM's class knows a head that is the embedding.
    """

    config: str
    sizes: dict[str, Any]
    served_as: dict[str, Any] = field(default_factory=dict)
    may_be_tied: bool = True


_SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
# Where the head size is hidden / heads, and vLLM's CPU attention takes 32.
_WIDE = {"hidden_size": 128, "moe_intermediate_size": 96}
_LOCAL = {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}

FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family("Qwen3MoeConfig", {**_QWEN, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2_moe": Family("Qwen2MoeConfig", {**_QWEN, **_WIDE, "shared_expert_intermediate_size": 160}),
    "olmoe": Family("OlmoeConfig", {**_QWEN, **_WIDE, "intermediate_size": 96}, may_be_tied=False),
    "glm4_moe": Family("Glm4MoeConfig", {**_DEEPSEEK, "use_qk_norm": True, "attention_bias": True}, may_be_tied=False),
    "dots1": Family("Dots1Config", {**_DEEPSEEK, "layer_types": ["full_attention"] * 2}),
    "mixtral": Family("MixtralConfig", _LOCAL),
    "minimax_m2": Family(
        "MiniMaxM2Config",
        {**_LOCAL, "use_routing_bias": True, "rotary_dim": 32, "scoring_func": "sigmoid"},
        served_as={"scoring_func": "softmax"},
        may_be_tied=False,
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeConfig",
        {
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1Config",
        {
            "intermediate_size": 64,
            "moe_intermediate_size": [64, 64],
            "num_experts": 8,
            "moe_topk": [2, 2],
            "num_shared_expert": [1, 1],
            "use_qk_norm": True,
            "use_mixed_mlp_moe": True,
        },
    ),
}


def config_of(family: str, **overrides: Any) -> Any:
    """The config of a family's tiny model."""
    own = FAMILIES[family]
    return getattr(transformers, own.config)(**{**_SIZES, **own.sizes, **overrides})


def model_on_meta(config: Any) -> Any:
    """The trainer's model, without values."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def save(family: str, folder: Path, seed: int, **overrides: Any) -> Path:
    """Save a family's tiny model, every weight random."""
    return save_random(transformers.AutoModelForCausalLM.from_config(config_of(family, **overrides)), folder, seed)
