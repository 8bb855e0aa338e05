"""The quickstart's model and tokenizer: a small Qwen3-MoE with random weights, made offline from a seed."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

__all__ = ["build_model", "build_tokenizer", "write_model"]

PAD, END, USER, ASSISTANT, SYSTEM, UNKNOWN = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|unk|>"
SPECIAL = (PAD, END, USER, ASSISTANT, SYSTEM, UNKNOWN)
CHARACTERS = "0123456789+-*/=()<>.,:;?! "

# Every turn is closed by the end token and nothing else, so a conversation tokenized turn by turn (as verl's SFT
# dataset does) is the conversation tokenized at once.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of 32 tokens: one per character, and one for each role."""
    vocab = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, **sizes: Any) -> Qwen3MoeForCausalLM:
    """Build 2 MoE layers of 16 experts, 2 of them per token; 2.5 million parameters in float32.

    ``vocab_size == len(tokenizer)``: vLLM masks logits beyond the tokenizer and the actor does not, so any padding of
    the vocabulary would show as a constant difference of log-probs. Expert matrices are not square, and their sides
    are multiples of 32, as vLLM's packed CPU kernels want them.

    Args:
        sizes: other ones, as the config has them.
    """
    own = dict(
        vocab_size=len(tokenizer),
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
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    config = Qwen3MoeConfig(**{**own, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, do_sample=True
    )
    return model


def write_model(folder: Path, seed: int) -> None:
    """Save model and tokenizer to ``folder`` as a Hugging Face checkpoint (safetensors, one tensor per expert)."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
