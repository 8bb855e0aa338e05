"""The small files of a checkpoint's folder, which a save copies beside the trained weights.

A server's behaviour depends on generation config, tokenizer, chat templates, processor and custom code, so their bytes
are copied. Saved by transformers they would be rewritten, and files that it finds invalid would be missing.
"""

import json
import logging
import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PretrainedConfig

from .errors import listed

__all__ = [
    "CONFIG",
    "GENERATION_CONFIG",
    "PATTERNS",
    "folder_of",
    "is_code",
    "json_bytes",
    "predicted_layers",
    "read_small_files",
    "with_chat_template",
    "with_dtype",
    "with_overrides",
    "write_files",
]

logger = logging.getLogger("epfsdp2")

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
# Files that are downloaded with the weights.
PATTERNS = ("*.json", "*.jinja", "*.model", "*.model.*", "*.py", "*.tiktoken", "*.txt", "LICENSE*")
_MOST_BYTES = 256 << 20  # the largest tokenizers have 40 MB
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_LEFT_OUT = (
    # weights, also in other frameworks' formats, and their indices
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx*"),
    # configs that describe the base's weights: this format's, Mistral's, quantised ones', adapters'
    *(CONFIG, "params.json", "hf_quant_config.json", "quant*_config.json", "adapter_*"),
    # a trainer's state, and descriptions of the base
    *("optimizer*", "scheduler*", "rng_state*", "training_args*", "trainer_state.json", "README*", ".*"),
)
# Numbers of multi-token prediction layers, which transformers does not load.
_PREDICTED = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_NESTED = ("text_config", "mtp_config")  # parts of a config that may have the number; the latter in Inkling's


def read_small_files(folder: Path) -> dict[str, bytes]:
    """Read a model's files beside its config and weights, by their names in the folder.

    Files larger than any tokenizer, and links out of the folder or the hub's blobs, are left out with a warning.
    """
    own = folder.resolve()
    places = [own, own.parent.parent / "blobs"] if own.parent.name == "snapshots" else [own]
    files, left_out = {}, []
    for path in sorted((*folder.glob("*"), *folder.glob(f"{_TEMPLATES}/*.jinja"))):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or any(fnmatch(path.name, pattern) for pattern in _LEFT_OUT):
            continue
        inside = any(path.resolve().is_relative_to(place) for place in places)
        if inside and path.stat().st_size <= _MOST_BYTES:
            files[name] = path.read_bytes()
        else:
            left_out.append(name)
    if left_out:
        logger.warning(
            "epfsdp2: not copied from %s, as links to outside of it or as too large: %s", folder, listed(left_out)
        )
    return files


def folder_of(path: str) -> Path:
    """Return a model's folder, or a hub id's in the hub's cache; raise a ``FileNotFoundError`` if there is none."""
    if os.path.isdir(path):
        return Path(path)
    for name in (CONFIG, "tokenizer_config.json"):
        found = try_to_load_from_cache(path, name)
        if isinstance(found, str):
            return Path(found).parent
    raise FileNotFoundError(f"{path} is no folder, and the hub's cache has no {CONFIG} of it.")


def is_code(name: str) -> bool:
    return name.endswith(".py")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def with_chat_template(files: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """Replace the chat template in all files that have one."""
    kept = {name: content for name, content in files.items() if not name.startswith((_TEMPLATES, "chat_template."))}
    for name in kept.keys() & {"tokenizer_config.json", "processor_config.json"}:
        fields = json.loads(kept[name])
        if fields.pop("chat_template", None) is not None:
            kept[name] = json_bytes(fields)
    return {**kept, _TEMPLATE: template.encode()}


def predicted_layers(config: Path) -> int:
    """Return the number of multi-token prediction layers by a ``config.json``, also where verl has set it to 0."""
    fields = json.loads(config.read_text())
    parts = (fields, *(fields.get(name) or {} for name in _NESTED))
    numbers = [part[name] or 0 for part in parts for name in _PREDICTED if name in part]
    return max(numbers, default=int(fields.get("model_type") == "qwen3_next"))  # its published configs have no number


def with_overrides(
    base: Path, overrides: Mapping[str, Any], trained: PretrainedConfig, has_mtp: bool = False
) -> dict[str, Any]:
    """Return the ``config.json`` of the trained weights: the base's fields under the base's names, and the overrides.

    The ``base`` file is read, not ``trained``, because an older transformers or vLLM does not have newer names. Also,
    in verl the tokenizer's end token replaces the base's list. Overrides that the family's config does not have
    (attention implementation) are ignored, and so is the dtype, because a model is served in the base's. Without the
    multi-token prediction layers (``has_mtp``) the config has none.
    """
    known = type(trained).from_json_file(base)
    written = _overridden(json.loads(base.read_text()), overrides, known.to_dict())
    tied = getattr(trained, "tie_word_embeddings", None)
    if tied != getattr(known, "tie_word_embeddings", None):
        written["tie_word_embeddings"] = tied
    for part in (written, *map(written.get, _NESTED)):
        if isinstance(part, dict) and not has_mtp:
            part.update({name: 0 for name in _PREDICTED if part.get(name)})
    return written


def _overridden(base: Mapping[str, Any], overrides: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    written = dict(base)
    for name, value in overrides.items():
        if isinstance(value, Mapping):
            written[name] = _overridden(base.get(name) or {}, value, known.get(name) or {})
        elif name in known and name not in ("dtype", "torch_dtype"):
            written[name] = value
    return written


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config with another dtype of the weights, also in its nested configs."""
    written = {
        name: with_dtype(value, dtype) if isinstance(value, Mapping) and name.endswith("_config") else value
        for name, value in config.items()
    }
    written.update({name: dtype for name in ("dtype", "torch_dtype") if name in config})
    return written
