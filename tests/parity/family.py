"""Recipes for tiny random models of families."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from tests.support.models.dbrx import plain_dbrx
from tests.support.models.tiny import VOCAB

__all__ = [
    "DBRX",
    "DEEPSEEK",
    "GRANITE",
    "HEADS",
    "LINEAR",
    "LOCAL",
    "MLA",
    "QWEN",
    "SCALED",
    "SMALL_TOWER",
    "SPARSE_LAYERS",
    "VISION",
    "AsAuto",
    "Family",
    "model_class",
    "of",
    "sizes",
]


@dataclass(frozen=True)
class Family:
    """Recipe for one family's model.

    Args:
        model: class in transformers, ``<Name>ForCausalLM`` or another class with logits.
        config: class of its config.
        sizes: arguments of the config.
        std: standard deviation of random weights; small enough that rounding errors stay below 1e-5.
        vectors: range of random weights with one dim (norms, decays), for the same reason.
        train: whether the model is compared in training mode.
        dtype: dtype of the comparison; float64 where the model magnifies float32's rounding errors.
        note: printed in the table.
    """

    model: str
    config: str
    sizes: dict[str, Any]
    std: float = 0.1
    vectors: tuple[float, float] = (0.5, 1.5)
    train: bool = True
    dtype: str = "float32"
    note: str = ""

    @property
    def attention(self) -> str:
        """Return sdpa if the class supports it, else eager (on a CPU, only gpt-oss's own attention has sinks)."""
        return "sdpa" if getattr(model_class(self.model), "_supports_sdpa", False) else "eager"

    def build(self, attention: str = "eager", **sizes: Any) -> Any:
        config = getattr(transformers, self.config)(**{**self.sizes, **sizes})
        config._attn_implementation = attention
        return model_class(self.model)(config)

    def build_random(self, attention: str, **sizes: Any) -> Any:
        """Build in float64, with random weights from a seed, and the model's own loop over experts."""
        torch.manual_seed(5)
        model = self.build(attention, **sizes)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(std=self.std) if param.dim() > 1 else param.uniform_(*self.vectors)
            for name, buffer in model.named_buffers():
                if "tid2eid" in name:  # a router with experts by token id
                    buffer.random_(0, 8)
        model.set_experts_implementation("eager")
        return model.double().train(self.train)


def model_class(name: str) -> Any:
    if name == "DbrxForCausalLM":
        return plain_dbrx()
    if hasattr(transformers, name):
        return getattr(transformers, name)
    if name.startswith("Qwen3_5Moe"):
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as module
    elif name.startswith("Ernie4_5_VLMoe"):
        from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as module
    else:
        raise AttributeError(f"transformers has no {name}")
    return getattr(module, name)


class AsAuto:
    """A model's class in place of an auto class."""

    def __init__(self, kind: type):
        self.kind = kind

    def from_config(self, config, dtype, **_):
        return self.kind._from_config(config, dtype=dtype)


def sizes(**own: Any) -> dict[str, Any]:
    """Return sizes without squares and with few powers of two; configs keep unknown ones as attributes."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **own,
    }


def of(name: str, head: str = "ForCausalLM", **own: Any) -> Family:
    options = {key: own.pop(key) for key in ("std", "vectors", "train", "dtype", "note") if key in own}
    config = own.pop("config", name + "Config")
    return Family(name + head, config, sizes(**own), **options)


# clip_qkv clips a few queries, keys and values. transformers 5.23 ignores ``hidden_size``: experts have ``d_model``.
DBRX = {
    "d_model": 48,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 1e4},
    "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 20, "moe_num_experts": 8, "moe_top_k": 2},
}
QWEN = {"intermediate_size": 40, "moe_intermediate_size": 18, "num_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "head_dim": 8,
}
SPARSE_LAYERS = ["dense", "sparse", "sparse"]
LOCAL = {"intermediate_size": 20, "num_local_experts": 8, "num_experts_per_tok": 2}
GRANITE = {
    **LOCAL,
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_expert_intermediate_size": 20,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
SCALED = (
    *("beam", "cohere2_moe", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    *("inkling2", "inkling2_loop", "mistral_large4"),
)
"""Families that scale or cap their logits."""
SMALL_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
HEADS = [
    ("phimoe", "lm_head_bias", True),
    ("ernie4_5_moe", "use_bias", True),
    ("gemma4", "final_logit_softcapping", 5.0),
]
"""Options of the head that larger models of three families have, and the tiny ones here lack."""
