"""Small models of other families for the quickstart's task, and the settings that vLLM's CPU build needs for them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from epfsdp2.engine.config.settings import as_yaml
from epfsdp2.recipes.quickstart.model import build_tokenizer
from tests.rollout.served_families import SERVED

__all__ = ["ATTENTION", "FAMILIES", "build_model", "settings", "write_model"]

# Sizes beside those of ``SERVED``: wide enough to learn sums, and no matrix of an expert is square.
_WIDE = {"hidden_size": 128, "max_position_embeddings": 128, "initializer_range": 0.1}
_MORE_EXPERTS = {"moe_intermediate_size": 192, "num_experts": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_WIDE, **_MORE_EXPERTS, "mlp_only_layers": []},
    "qwen3_next": {**_WIDE, **_MORE_EXPERTS},
    "qwen3_5_moe": {**_WIDE, **_MORE_EXPERTS},
    "gpt_oss": {**_WIDE, "intermediate_size": 192, "num_local_experts": 16},
    "deepseek_v3": {**_WIDE, "intermediate_size": 384, "moe_intermediate_size": 192, "n_routed_experts": 16},
    "qwen3": {**_WIDE, "intermediate_size": 384},
    "qwen2": {**_WIDE, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2},
}
# transformers has no sdpa with sinks.
ATTENTION = {"gpt_oss": "eager"}


def build_model(name: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Build one with random weights in float32, as ``recipes.quickstart.model`` builds its own."""
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    family = SERVED[name].family
    family = replace(family, sizes={**family.sizes, **FAMILIES[name], "vocab_size": len(tokenizer), **ids})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family.build().float()
    model.config.architectures = [type(model).__name__]
    model.generation_config = GenerationConfig(**ids, do_sample=True)
    return model


def write_model(name: str, folder: Path, seed: int) -> None:
    """Save model and tokenizer to ``folder`` as a Hugging Face checkpoint."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens("\n")  # verl's agent loop asks a Qwen2's tokenizer for it
    build_model(name, tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def settings(name: str, vllm: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Return overrides of a run: the dtype of vLLM and of the trainer's forward, and settings for vLLM's CPU build.

    ``vllm`` are settings in place of the family's own.
    """
    served = SERVED[name]
    short = {"float32": "fp32", "bfloat16": "bf16"}[served.dtype]
    kept = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    return [
        f"actor_rollout_ref.rollout.dtype={served.dtype}",
        f"engine.mixed_precision={{param_dtype:{short},reduce_dtype:fp32,buffer_dtype:fp32}}",
        *(f"+{kept}.{key}={as_yaml(value)}" for key, value in {**served.settings, **vllm}.items()),
    ]
