"""Tiny random Mixture-of-Experts models, from seeds."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

__all__ = ["reference_model", "save_qwen3_moe", "token_loss", "VOCAB"]

VOCAB = 96


def save_qwen3_moe(folder: Path, seed: int = 0, **overrides) -> Path:
    """Save a Qwen3-MoE with 8 experts in 2 of 3 layers, every weight random; sizes are odd on purpose."""
    config = Qwen3MoeConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            **overrides,
        }
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.1) if param.dim() > 1 else param.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def reference_model(folder: Path) -> nn.Module:
    """The plain Hugging Face model, float32."""
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)


def token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss of ids ``(B, S)``."""
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
