"""A tiny model of every family whose layout in vLLM is known, in sizes that two and four workers divide."""

from pathlib import Path
from typing import Any

import torch
import transformers

from epfsdp2.engine.moe.outside.families import prepare
from epfsdp2.rollout.vllm.layout import known_families
from tests.rollout.served_families import SERVED, publish_config
from tests.support.models.dbrx import plain_dbrx
from tests.support.models.tiny import publish, save_random

__all__ = ["ALWAYS_TIED", "DENSE", "FAMILIES", "MAY_BE_TIED", "NOT_SLICED", "SIZES"]
__all__ += ["config_of", "known", "model_of", "model_on_meta", "save"]


# Heads that divide, of size hidden / heads = 32, which vLLM's CPU attention needs.
_WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
# HunYuan's configs may have these by layer.
_BY_LAYER = {"moe_intermediate_size": [64, 64], "moe_topk": [2, 2], "num_shared_expert": [1, 1]}
# Gemma 4's full attention has heads of another size, whose keys are values too.
_SHARED_KEYS = {"attention_k_eq_v": True, "global_head_dim": 64, "num_global_key_value_heads": 1}
_DBRX = {
    "d_model": 128,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 1e4},
    "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
}
_FOUR_KEYS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}

# Changes of the sizes in ``served_families.py``.
SIZES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**_WIDE, "moe_intermediate_size": 96},
    **dict.fromkeys(
        ("olmoe", "flex_olmo", "granitemoe", "granitemoeshared", "granitemoe_swa"), {**_WIDE, "intermediate_size": 96}
    ),
    "granitemoehybrid": {**_WIDE, "intermediate_size": 96, "mamba_d_head": 64},
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True},
    "glm4v_moe": {"attention_bias": True},
    **dict.fromkeys(("gemma4", "gemma4_vl"), _SHARED_KEYS),
    "dbrx": {**_WIDE, **_DBRX},
    **dict.fromkeys(("lfm2_moe", "jamba", "qwen2"), _WIDE),
    "deepseek_v4": {"o_groups": 4},
    "nemotron_h": {"mamba_head_dim": 64, "n_groups": 4},
    # vLLM 0.29 does not pad experts whose gate and up are interleaved: four workers have 32 rows each.
    "gpt_oss": {"num_key_value_heads": 4, "intermediate_size": 128},
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_vl", "qwen3_5_vl"), _FOUR_KEYS),
    "hunyuan_v1_moe": _BY_LAYER,
}
NOT_SLICED = ("glm4_moe_bf16", "internvl", "mistral4", "qwen3_moe_tied")
FAMILIES = tuple(name for name in SERVED if name not in NOT_SLICED)
DENSE = ("qwen3", "qwen3_5_vl", "qwen3_vl", "qwen2", "llama", "gemma3", "mistral")
# Families whose class in vLLM supports a tied head: only that, or that too.
ALWAYS_TIED = ("lfm2_moe", "cohere2_moe")
MAY_BE_TIED = (
    *("qwen3_moe", "qwen2_moe", "dots1", "mixtral", "gemma4", "gemma4_vl", "granitemoe", "granitemoeshared"),
    *("granitemoehybrid", "hy_v3", "laguna", "llama4", "llama4_text", "qwen3_5_moe", "qwen3_5_moe_vl", "qwen3_vl_moe"),
    *("ernie4_5_moe", "hunyuan_v1_moe", *DENSE),
)


def config_of(family: str, **overrides: Any) -> Any:
    """Return the config of a family's tiny model."""
    served = SERVED[family].family
    changes = {**SIZES.get(family, {}), **overrides}
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
    publish_config(folder, SERVED[family].published)
    return folder


def _plain(config: Any) -> Any:
    if config.model_type == "dbrx":
        return plain_dbrx()(config)
    kind = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
    return getattr(transformers, f"AutoModelFor{kind}").from_config(config)
