"""The quickstart's model and tokenizer: a small Qwen3-MoE with random weights from a seed."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

__all__ = ["SPECIAL", "build_model", "build_tokenizer", "write_model"]

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|unk|>")
_CHARACTERS = "0123456789+-*/=()<>.,:;?! "
# Only the end token closes a turn, so a conversation's tokens are the sum of its turns', as verl's SFT dataset assumes.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Expert matrices are not square, and their sides are multiples of 32, as vLLM's packed CPU kernels require.
_SIZES = dict(
    hidden_size=128,
    intermediate_size=384,
    moe_intermediate_size=192,
    num_experts=16,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    initializer_range=0.1,
    dtype="float32",
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of 32 tokens: one per character and role."""
    vocab = {token: index for index, token in enumerate((*SPECIAL, *_CHARACTERS))}
    pad, end, *roles, unknown = SPECIAL
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        unk_token=unknown,
        additional_special_tokens=roles,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, **sizes: Any) -> Qwen3MoeForCausalLM:
    """Build 2 MoE layers of 16 experts, 2 per token: 2.5 million parameters in float32; ``sizes`` replace the config's.

    The vocabulary is the tokenizer's, because vLLM masks logits beyond it and the actor would not.
    """
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3MoeConfig(**{**_SIZES, **ends, "vocab_size": len(tokenizer), **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(**ends, do_sample=True)
    return model


def write_model(folder: Path, seed: int) -> None:
    """Save model and tokenizer as a Hugging Face checkpoint."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
