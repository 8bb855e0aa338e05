"""Models for tests of Muon, and torch's Muon on their matrices in one process."""

from unittest import mock

import torch
from torch import nn
from torch.optim import _muon as torch_muon
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    NemotronHConfig,
    Qwen3MoeConfig,
)

__all__ = ["COMMON", "CONFIGS", "muon_model", "stepped_by_torch"]

COMMON = {
    "vocab_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


def _qwen3(**sizes):
    return Qwen3MoeConfig(
        **{**COMMON, "num_hidden_layers": 2, "num_experts_per_tok": 2, "mlp_only_layers": [1], **sizes}
    )


CONFIGS = {
    # 5 rows over 4 ranks leave none for the last rank; shards of 2I = 44 cut gate and up.
    "qwen3": lambda: _qwen3(hidden_size=20, intermediate_size=5, moe_intermediate_size=22, num_experts=8),
    # 4 does not divide 2I = 46, so ep_fsdp=4 shards columns, of 12 experts.
    "qwen3-odd": lambda: _qwen3(hidden_size=28, intermediate_size=9, moe_intermediate_size=23, num_experts=12),
    # Only the dim of the 6 experts can be sharded over 4 ranks: 2, 2, 2 and none.
    "qwen3-uneven": lambda: _qwen3(hidden_size=26, intermediate_size=9, moe_intermediate_size=23, num_experts=6),
    "gpt-oss": lambda: GptOssConfig(
        **COMMON, hidden_size=20, intermediate_size=14, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2
    ),
    # ep_fsdp=4 can't shard 18 rows, so it shards 2I = 28 columns of interleaved gate and up.
    "gpt-oss-columns": lambda: GptOssConfig(
        **COMMON, hidden_size=18, intermediate_size=14, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=1
    ),
    "nemotron-h": lambda: NemotronHConfig(
        **COMMON,
        hidden_size=20,
        layers_block_type=["moe", "attention", "mamba", "mlp"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=14,
        moe_latent_size=16,
        intermediate_size=10,
        mamba_num_heads=4,
        mamba_head_dim=6,
        ssm_state_size=8,
        n_groups=2,
    ),
}


def muon_model(config):
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _split(name, weight):
    """Split a parameter into its matrices, output dim first, by the family's layout, without the module's flags."""
    experts = ".experts." in name
    if not experts:
        return [weight]
    gpt_oss, is_adapter = "gpt_oss" in name, "_lora_" in name
    matrices = []
    for expert in weight:
        expert = expert.T if gpt_oss and not is_adapter else expert
        if not name.endswith(("gate_up_proj", "gate_up_proj_lora_B")):
            matrices.append(expert)
        elif gpt_oss:
            matrices += [expert[0::2], expert[1::2]]
        else:
            matrices += [expert[: len(expert) // 2], expert[len(expert) // 2 :]]
    return matrices


def _zeropower_fp32(grad, coefficients, steps, eps):
    a, b, c = coefficients
    x = grad / grad.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def stepped_by_torch(weights, gradients, **options):
    """Return the weights after each step of torch's Muon on separate matrices, in float32."""
    pieces = {name: [nn.Parameter(m.clone()) for m in _split(name, w)] for name, w in weights.items()}
    optimizer = torch.optim.Muon([p for parts in pieces.values() for p in parts], **options)
    after = []
    with mock.patch.object(torch_muon, "_zeropower_via_newtonschulz", _zeropower_fp32):
        for grads in gradients:
            for name, parts in pieces.items():
                for part, grad in zip(parts, _split(name, grads[name]), strict=True):
                    part.grad = grad.clone()
            optimizer.step()
            stepped = {name: w.clone() for name, w in weights.items()}
            for name, parts in pieces.items():
                for view, part in zip(_split(name, stepped[name]), parts, strict=True):
                    view.copy_(part.detach())
            after.append(stepped)
    return after
