"""Differences of the families' tiny models (``families.py``) when SGLang serves them on a CPU."""

from typing import Any

__all__ = ["SIZES"]

# SGLang knows no dense layers between those with experts, and no heads of Mixtral of another size than hidden / heads.
# On a CPU it pads parts that are not a multiple of 32, and has latent attention with these positions alone.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 192},
    "mixtral": {"hidden_size": 128},
    "olmoe": {"intermediate_size": 64, "num_key_value_heads": 4},  # SGLang's norms of keys are as wide as of queries
    "glm4_moe": {},
    "deepseek_v3": {"rope_parameters": _YARN, "moe_layer_freq": 1},  # as its checkpoints have it
    "qwen3": {"intermediate_size": 192, "tie_word_embeddings": True},
    "qwen2": {"intermediate_size": 192},
    "llama": {"intermediate_size": 192, "attention_bias": True},
}
