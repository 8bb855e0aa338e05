"""Checkpoint folders that look like published ones, whatever tiny model they hold."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from epfsdp2.engine.model.meta import kept_in_float32

__all__ = [
    "CHAT_TEMPLATE",
    "GENERATION",
    "as_transformers_4",
    "read_config",
    "save_published",
    "stored_values",
    "write_config",
]

# More than one end token, and defaults of sampling; the padding token is none of the end tokens.
GENERATION = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}
CHAT_TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
_SHARDS = 3
_UNUSED_IDS = 4  # a vocabulary is larger than its tokenizer's, for the sake of GEMMs


def save_published(model: Any, folder: Path, seed: int = 0, one_file: bool = False) -> Path:
    """Save a model in bfloat16 as its publisher would: shards with an index, generation config, tokenizer, template.

    The model's own values are rounded to bfloat16, so that they equal those of the files.

    Args:
        seed: its first bit has the config spelled as by transformers 4, its second has vectors stored in float32.
        one_file: write ``model.safetensors`` instead of shards.
    """
    is_older, is_mixed = bool(seed & 1), bool(seed & 2)
    for tensor in _stored(model):
        tensor.data = tensor.data.bfloat16().to(tensor.dtype)
    stored = copy.deepcopy(model)
    for tensor in _stored(stored):
        tensor.data = tensor.data.float() if is_mixed and tensor.dim() == 1 else tensor.data.bfloat16()
    nbytes = sum(tensor.nbytes for tensor in stored.parameters())
    stored.save_pretrained(folder, max_shard_size=2 * nbytes if one_file else nbytes // _SHARDS)
    config = {**read_config(folder), "dtype": "bfloat16"}
    write_config(folder, as_transformers_4(config) if is_older else config)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2))
    _tokenizer(model.config.get_text_config().vocab_size - _UNUSED_IDS).save_pretrained(folder)
    return folder


def _stored(model: Any) -> list[torch.Tensor]:
    """Parameters and buffers that a checkpoint has, but for integers and those that the class keeps in float32."""
    kept, tensors = kept_in_float32(model), model.state_dict(keep_vars=True).items()
    return [tensor for name, tensor in tensors if tensor.is_floating_point() and not kept.search(name)]


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of words ``t0 t1 ...``, whose padding token is not its end token."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t4"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "t0", "bos_token": "t1", "eos_token": "t2", "unk_token": "t4"}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=CHAT_TEMPLATE, **special)


def as_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the older spelling of its dtype and of its rotary embeddings, in nested configs too."""
    older = {
        key: as_transformers_4(value) if value and key.endswith("_config") else value for key, value in config.items()
    }
    if "dtype" in older:
        older["torch_dtype"] = older.pop("dtype")
    rope = older.get("rope_parameters")
    if rope and "rope_theta" in rope:  # not those with other ones for each type of layer
        scaling = {"type" if key == "rope_type" else key: v for key, v in rope.items() if key != "rope_theta"}
        is_plain = scaling == {"type": "default"}
        older |= {"rope_theta": rope["rope_theta"], "rope_scaling": None if is_plain else scaling}
        del older["rope_parameters"]
    return older


def stored_values(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files by name; floating-point ones in float32, as the tests' runs keep them."""
    tensors = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json."""
    return json.loads((folder / "config.json").read_text())


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2))
