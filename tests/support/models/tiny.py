"""Tiny random Mixture-of-Experts models, from seeds."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from epfsdp2.engine.model.families import RENAMED_WHEN_PUBLISHED, TRANSPOSED_WHEN_PUBLISHED
from epfsdp2.engine.model.hf_names import published_name
from tests.support.models.published import save_published

__all__ = [
    "VOCAB",
    "adam",
    "publish",
    "reference_model",
    "relative_error",
    "save_glm4_moe",
    "save_qwen3",
    "save_qwen3_moe",
    "save_random",
    "token_batch",
    "token_loss",
]

VOCAB = 96


def save_qwen3_moe(folder: Path, seed: int = 0, one_file: bool = False, **overrides) -> Path:
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
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **overrides,
        }
    )
    return save_random(Qwen3MoeForCausalLM(config), folder, seed, one_file)


def save_qwen3(folder: Path, seed: int = 0, one_file: bool = False, **overrides) -> Path:
    """Save a dense Qwen3 of three layers, every weight random."""
    config = Qwen3Config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **overrides,
        }
    )
    return save_random(Qwen3ForCausalLM(config), folder, seed, one_file)


def save_glm4_moe(folder: Path, seed: int = 0, one_file: bool = False, **overrides) -> Path:
    """Save a GLM-4-MoE: sigmoid routing with a correction bias (a persistent buffer), shared experts, a dense layer."""
    config = Glm4MoeConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **overrides,
        }
    )
    return save_random(Glm4MoeForCausalLM(config), folder, seed, one_file)


def save_random(model: nn.Module, folder: Path, seed: int, one_file: bool = False) -> Path:
    """Save a model with every weight and every correction bias drawn from ``seed``, as ``save_published`` does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.1) if param.dim() > 1 else param.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
                buffer.uniform_(-0.1, 0.1)
            elif name.endswith("tid2eid"):  # experts by token id
                buffer.random_(0, model.config.n_routed_experts)
    return save_published(model, folder, seed, one_file)


def publish(folder: Path) -> None:
    """Give what transformers has saved the published names, and stacks of experts the published ``[E, in, out]``."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    if family not in TRANSPOSED_WHEN_PUBLISHED and family not in RENAMED_WHEN_PUBLISHED:
        return
    for index in folder.glob("*.index.json"):
        written = json.loads(index.read_text())
        written["weight_map"] = {published_name(family, name): file for name, file in written["weight_map"].items()}
        index.write_text(json.dumps(written))
    for file in folder.glob("*.safetensors"):
        tensors = {published_name(family, name): tensor for name, tensor in load_file(file).items()}
        for name in tensors if family in TRANSPOSED_WHEN_PUBLISHED else ():
            if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                tensors[name] = tensors[name].transpose(1, 2).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})


def reference_model(folder: Path, attention: str = "sdpa") -> nn.Module:
    """The plain Hugging Face model, float32, its experts computed by its own loop (sizes may be odd)."""
    config = AutoConfig.from_pretrained(folder, attn_implementation=attention)
    has_tower = config.model_type in ("inkling_mm_model", "step3p7")
    kind = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    return kind.from_pretrained(folder, config=config, dtype=torch.float32, experts_implementation="eager")


def token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss of ids ``(B, S)``."""
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def token_batch(world: int) -> torch.Tensor:
    """Ids of two rows for each rank, the same everywhere."""
    return torch.randint(0, VOCAB, (2 * world, 17), generator=torch.Generator().manual_seed(1))


def adam(params) -> torch.optim.Optimizer:
    """With an eps that does not magnify rounding errors of tiny gradients."""
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-6)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference by that of the reference; infinity, which no bound allows, for not-a-number."""
    value, reference = value.double(), reference.double()
    return ((value - reference).norm() / reference.norm().clamp_min(1e-12)).nan_to_num(nan=torch.inf).item()
