"""A tiny model of every family whose layout in vLLM is known, in sizes that two and four workers divide."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from epfsdp2.engine.moe.outside.families import prepare
from epfsdp2.rollout.vllm.layout import known_families
from tests.rollout.served_families import SERVED
from tests.support.models.dbrx import plain_dbrx
from tests.support.models.tiny import publish, save_random

__all__ = ["DENSE", "FAMILIES", "Family", "config_of", "known", "model_of", "model_on_meta", "save"]


@dataclass(frozen=True)
class Family:
    """Differences from the family's model in ``served_families.py``.

    Args:
        sizes: arguments of its config.
        may_be_tied: whether vLLM's class supports a tied head.
        is_tied: whether it supports only a tied head.
    """

    sizes: dict[str, Any] = field(default_factory=dict)
    may_be_tied: bool = True
    is_tied: bool = False


# Heads that divide, of size hidden / heads = 32, which vLLM's CPU attention needs.
_WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
# HunYuan's configs may have these by layer.
_BY_LAYER = {"moe_intermediate_size": [64, 64], "moe_topk": [2, 2], "num_shared_expert": [1, 1]}
# Gemma 4's full attention has heads of another size, whose keys are values too.
_SHARED_KEYS = {"attention_k_eq_v": True, "global_head_dim": 64, "num_global_key_value_heads": 1}
_DBRX = {
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 1e4},
    "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
}
_FOUR_KEYS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}

FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(),
    "qwen2_moe": Family({**_WIDE, "moe_intermediate_size": 96}),
    "olmoe": Family({**_WIDE, "intermediate_size": 96}, may_be_tied=False),
    "glm4_moe": Family({"use_qk_norm": True, "attention_bias": True}, may_be_tied=False),
    "glm4v_moe": Family({"attention_bias": True}, may_be_tied=False),
    "dots1": Family(),
    "mixtral": Family(),
    "minimax_m2": Family(may_be_tied=False),
    "deepseek_v3": Family(may_be_tied=False),
    "deepseek_v3_latent": Family(may_be_tied=False),
    "gemma4": Family(_SHARED_KEYS),
    "gemma4_vl": Family(_SHARED_KEYS),
    "deepseek_v2": Family(may_be_tied=False),
    "glm4_moe_lite": Family(may_be_tied=False),
    "glm_moe_dsa": Family(may_be_tied=False),
    "flex_olmo": Family({**_WIDE, "intermediate_size": 96}, may_be_tied=False),
    "afmoe": Family(may_be_tied=False),
    "dbrx": Family({**_WIDE, **_DBRX}, may_be_tied=False),
    "granitemoe": Family({**_WIDE, "intermediate_size": 96}),
    "granitemoeshared": Family({**_WIDE, "intermediate_size": 96}),
    "granitemoehybrid": Family({**_WIDE, "intermediate_size": 96, "mamba_d_head": 64}),
    "phimoe": Family(may_be_tied=False),
    "exaone_moe": Family(may_be_tied=False),
    "lfm2_moe": Family(_WIDE, is_tied=True),
    "hy_v3": Family(),
    "cohere2_moe": Family(is_tied=True),
    "solar_open": Family(may_be_tied=False),
    "jamba": Family(_WIDE, may_be_tied=False),
    "laguna": Family(),
    "llama4": Family(),
    "llama4_text": Family(),
    "nemotron_h": Family({"mamba_head_dim": 64, "n_groups": 4}, may_be_tied=False),
    # vLLM 0.29 does not pad experts whose gate and up are interleaved: four workers have 32 rows each.
    "gpt_oss": Family({"num_key_value_heads": 4, "intermediate_size": 128}, may_be_tied=False),
    "qwen3_next": Family(_FOUR_KEYS, may_be_tied=False),
    "qwen3_5_moe": Family(_FOUR_KEYS),
    "qwen3_5_moe_vl": Family(_FOUR_KEYS),
    "qwen3_vl_moe": Family(),
    "ernie4_5_moe": Family(),
    "hunyuan_v1_moe": Family(_BY_LAYER),
    "qwen3": Family(),
    "qwen3_5_vl": Family(_FOUR_KEYS),
    "qwen3_vl": Family(),
    "qwen2": Family(_WIDE),
    "llama": Family(),
    "gemma3": Family(),
    "mistral": Family(),
}
DENSE = ("qwen3", "qwen3_5_vl", "qwen3_vl", "qwen2", "llama", "gemma3", "mistral")


def config_of(family: str, **overrides: Any) -> Any:
    """Return the config of a family's tiny model."""
    served = SERVED[family].family
    changes = {**FAMILIES[family].sizes, **overrides}
    if "text_config" in served.sizes:
        tied = {"tie_word_embeddings": changes.get("tie_word_embeddings", False)}
        changes = {"text_config": {**served.sizes["text_config"], **changes}, **tied}
    return getattr(transformers, served.config)(**{**served.sizes, **changes})


def known(family: str) -> bool:
    """Whether the family's layout in the installed vLLM is known."""
    return config_of(family).model_type in known_families()


def model_on_meta(config: Any) -> Any:
    """Build the trainer's model on meta."""
    with torch.device("meta"):
        return model_of(config)


def model_of(config: Any) -> Any:
    """Build the trainer's model."""
    model = _plain(config)
    prepare(model)
    return model


def save(family: str, folder: Path, seed: int, **overrides: Any) -> Path:
    """Save a family's tiny model with random weights, as vLLM can load it."""
    save_random(_plain(config_of(family, **overrides)), folder, seed)
    publish(folder)
    return folder


def _plain(config: Any) -> Any:
    if config.model_type == "dbrx":
        return plain_dbrx()(config)
    kind = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
    return getattr(transformers, f"AutoModelFor{kind}").from_config(config)
