"""The quickstart's model and tokenizer: a small Qwen3-MoE with random weights from a seed."""

from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

__all__ = ["SPECIAL", "build_model", "build_tokenizer", "write_model"]

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|unk|>")
_CHARACTERS = "0123456789+-*/=()<>.,:;?! "
# Only the end token closes a turn, so a conversation's tokens are the sum of its turns', as verl's SFT dataset assumes.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
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
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, **sizes: Any) -> Qwen3MoeForCausalLM:
    """Build a model of 2.5 million parameters in float32; ``sizes`` replace those of ``model.yaml``.

    The vocabulary is the tokenizer's, because vLLM masks logits beyond it and the actor would not.
    """
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    own = yaml.safe_load(Path(__file__).with_name("model.yaml").read_text())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**own, **ends, "vocab_size": len(tokenizer), **sizes}))


def write_model(folder: Path, seed: int) -> None:
    """Save model and tokenizer as a Hugging Face checkpoint."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
