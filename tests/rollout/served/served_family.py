"""A family as tests serve it: the tiny model, vLLM's settings, and the sizes that families share."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from epfsdp2.engine.compat import versions
from tests.parity.families import Family
from tests.support.models.vlm import IMAGE_TOKENS

__all__ = [
    "DEEPSEEK",
    "DENSE",
    "EXPERTS",
    "GEMMA",
    "HALF_MROPE",
    "LINEAR",
    "LOCAL",
    "MAMBA2",
    "MAMBA2_LAYER",
    "MLA",
    "MROPE",
]
__all__ += ["PLAIN_ROTARY", "QUARTER_MROPE", "QWEN", "STATE", "Served", "TEXT_ALONE", "THREE_HEADS", "TORCHVISION"]
__all__ += ["TWO_HEADS", "VOCAB", "of", "seeing", "text_sizes"]


@dataclass(frozen=True)
class Served:
    """A family's tiny model, and the settings and environment variables that vLLM's CPU build needs for it.

    No matrix is square: hidden is neither the experts' size nor twice it. vLLM pads its vocabulary. The sizes of its
    experts are multiples of 32, the CPU kernel's rows.

    Args:
        published: entries of the published config.json, which vLLM reads, in place of transformers'; None for those
            that it lacks.
        broken: release of vLLM -> why it can't run this family by itself, without any sync.
        mute: release of vLLM whose CPU build loads the family and can't compute with it -> why. Parameters alone are
            compared then, and in every release with the engine that never computes.
    """

    family: Family
    dtype: str = "float32"
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    mute: dict[str, str] = field(default_factory=dict)

    def skip_where_broken(self) -> None:
        if _release() in self.broken:
            pytest.skip(f"vLLM {_release()}: {self.broken[_release()]}")

    @property
    def is_mute(self) -> bool:
        return _release() in self.mute or self.settings.get("extension") == "idle_extension.NeverComputes"


def _release() -> str:
    return ".".join(str(versions.installed("vllm")).split(".")[:2])


VOCAB = 200


def text_sizes(**own: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
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
        **own,
    }


def of(name: str, config: str = "", **sizes: Any) -> Family:
    return Family(f"{name}ForCausalLM", config or f"{name}Config", text_sizes(**sizes))


def seeing(name: str, text: dict[str, Any], **tower: Any) -> Family:
    """A model of text and images; ``tower`` are further sizes of its vision tower."""
    sizes = {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 96}
    vision = {"vision_config": {**sizes, "num_position_embeddings": 16, **tower}, "tie_word_embeddings": False}
    return Family(
        f"{name}ForConditionalGeneration",
        f"{name}Config",
        {"text_config": text_sizes(**text), **vision, **IMAGE_TOKENS},
    )


QWEN = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
EXPERTS = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}
DEEPSEEK = {**EXPERTS, "intermediate_size": 128, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
}
LOCAL = {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}
DENSE = {"intermediate_size": 160}
# Granite 4's name of its Mamba layers; any other name makes layers of attention.
MAMBA2_LAYER = transformers.GraniteMoeHybridConfig(num_hidden_layers=1).layer_types[0]
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 48,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 64,
}
# Without AMX vLLM's CPU kernel needs a state in float32; by default it has the model's dtype.
STATE = {} if torch.cpu._is_amx_tile_supported() else {"mamba_ssm_cache_dtype": "float32"}
GEMMA = {
    **QWEN,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
# The head size of these configs is hidden / heads, and vLLM's CPU attention needs 32.
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
# vLLM's operator for rotary embeddings works in place, which the CPU build gets wrong on strided views.
PLAIN_ROTARY = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
# vLLM's classes of these families import torchvision, whose builds on PyPI do not load beside a CPU build of torch.
TORCHVISION = {} if find_spec("torchvision") else {"PYTHONPATH": str(Path(__file__).parents[1] / "stubs")}

# transformers ignores the last entry and always interleaves; vLLM reads it.
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
HALF_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}
QUARTER_MROPE = {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
TEXT_ALONE = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
