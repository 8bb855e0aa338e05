"""What a run's checkpoint says of its shards and of its trainer, checked before a rank allocates anything of it.

Each shard's file says in its header where its tensors lie in the whole ones (torch's ``HuggingFaceStorageReader``; no
``.metadata``, which would be a pickle). A whole tensor has as many elements as its shards together, so that what a rank
allocates for it is what the files hold.
"""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from ..errors import SettingError, listed
from ..model.safetensors_files import DamagedFileError, SafetensorsFile
from .atomic_folder import CheckpointError

__all__ = ["HF", "MODEL", "SHARDS", "STATE", "check_contents", "read_facts", "shards_metadata"]

SHARDS, HF, STATE = "dist_ckpt", "huggingface", "trainer_state.json"
MODEL = "model."  # prefix of the names of a model's tensors in SHARDS
# Of the format (torch/distributed/checkpoint/_hf_utils.py): the metadata's key, and that of a shard's place.
_PLACES, _OFFSET = "DCP_SHARDING_INFO", "saved_offsets"


def shards_metadata(folder: Path) -> Metadata:
    """Return names, shapes and places of the tensors in a folder of shards.

    Raises:
        CheckpointError: a file is damaged, or shards do not make up whole tensors; names the file.
    """
    try:
        held: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            _collect(SafetensorsFile(path), held)
    except DamagedFileError as error:
        raise CheckpointError(f"{error.path.parent}: {error}.") from error
    wrong = [name for name, chunks in held.items() if not _is_whole(chunks)]
    if wrong:
        raise CheckpointError(f"{folder}: its shards do not make up whole tensors: {listed(wrong)}.")
    return dcp.HuggingFaceStorageReader(str(folder)).read_metadata()


def _contents_of(folder: Path) -> set[str]:
    """Return which of ``model``, ``optimizer`` and ``extra`` a checkpoint holds.

    Raises:
        CheckpointError: it is damaged.
    """
    facts, files = read_facts(folder), sorted((folder / SHARDS).glob("*.safetensors"))
    try:
        has_model = any(name.startswith(MODEL) for file in files for name in SafetensorsFile(file).shapes)
    except DamagedFileError as error:
        raise CheckpointError(f"{error.path.parent}: {error}.") from error
    found = {"model": has_model, "optimizer": facts["param_groups"] is not None, "extra": bool(facts["lr_scheduler"])}
    return {content for content, is_there in found.items() if is_there}


def check_contents(folder: Path, contents: Collection[str], node: str = "checkpoint") -> set[str]:
    """Check that a run can resume from a checkpoint by what it loads of it, and return what the checkpoint holds.

    Args:
        node: how the user calls the role's checkpoint settings.

    Raises:
        SettingError: the checkpoint has no weights or no optimizer state to load, or its weights are not loaded. Then a
            run would go on from its step with the weights of ``model.path``.
        CheckpointError: it is damaged.
    """
    held, setting = _contents_of(folder), f"{node}.load_contents"
    resumed = [content for content in ("model", "optimizer", "extra") if content in held]
    works = f"{setting}=[{','.join(resumed)}]"
    if "model" not in held:
        rule = f"{folder} holds no state to resume from, because it was saved with {node}.save_contents without model."
        works = "trainer.resume_mode=disable"
        if any((folder / HF).glob("*.safetensors")):
            works += f", with model.path={folder / HF} to train on from its weights"
    elif "model" not in contents:
        rule = "is without model, so that a run would go on with the weights of model.path instead of the trained ones."
    elif "optimizer" in set(contents) - held:
        rule = f"{folder} holds no optimizer state."
    else:
        return held
    raise SettingError(setting, list(contents), rule, works)


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the content of ``trainer_state.json``.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        facts = json.loads((folder / STATE).read_text())
        lora, groups = facts.get("lora"), facts["param_groups"]
        if type(facts["step"]) is not int or not isinstance(facts["lr_scheduler"], dict | None):
            raise ValueError("its step is no number, or its lr_scheduler no mapping")
        if groups is not None and not all(isinstance(group, dict) for group in list(groups)):
            raise ValueError("its param_groups are no mappings")
        if lora is not None and not lora["rank"] > 0 < lora["alpha"]:
            raise ValueError("rank and alpha of its lora have to be positive")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / STATE} is damaged: {type(error).__name__}: {error}") from error
    return facts


def _collect(file: SafetensorsFile, held: dict[str, dict[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Add offset and shape of a file's shards by their tensors' names."""
    places = _places(file)
    for name, shape in file.shapes.items():
        offset = places.get(name, {}).get(_OFFSET) if places is not None else [0] * len(shape)
        if not isinstance(offset, list) or len(offset) != len(shape) or not all(map(_is_place, offset)):
            raise DamagedFileError(file.path, f"it does not say where in the whole tensor its {name} lies")
        if tuple(offset) in held.setdefault(name, {}) and 0 not in shape:
            raise DamagedFileError(file.path, f"another file holds the same shard of {name}")
        held[name][tuple(offset)] = shape


def _places(file: SafetensorsFile) -> Mapping[str, Any] | None:
    text = file.metadata().get(_PLACES)
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(file.path, f"the places of its shards are damaged ({type(error).__name__})") from error
    if not isinstance(found, dict) or not all(isinstance(place, dict) for place in found.values()):
        raise DamagedFileError(file.path, "the places of its shards are damaged (no mapping)")
    return found


def _is_place(at: Any) -> bool:
    return isinstance(at, int) and not isinstance(at, bool) and 0 <= at < 2**62


def _is_whole(chunks: Mapping[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Return whether shards fill a tensor: they are within it, and have as many elements."""
    dims = {len(offset) for offset in chunks}
    if len(dims) > 1:
        return False
    ends = zip(*[[at + size for at, size in zip(*chunk, strict=True)] for chunk in chunks.items()], strict=True)
    return math.prod(map(max, ends)) == sum(map(math.prod, chunks.values()))
