"""What a run's checkpoint says of its shards and of its trainer, checked before a rank allocates anything of it.

Each shard's file says in its header where its tensors lie in the whole ones (torch's ``HuggingFaceStorageReader``; no
``.metadata``, which would be a pickle). A whole tensor has as many elements as its shards together, so that what a rank
allocates for it is what the files hold.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from ..errors import listed
from ..model.safetensors_files import DamagedFileError, SafetensorsFile
from .atomic_folder import CheckpointError

__all__ = ["STATE", "read_facts", "shards_metadata"]

STATE = "trainer_state.json"
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
