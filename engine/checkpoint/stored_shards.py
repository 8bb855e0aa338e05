"""The shards of a checkpoint: written and read by each rank for itself, and checked before a rank allocates anything.

A rank writes what it holds to a file of its own. The file's header says where each shard lies in the whole tensor, in
the format of torch's ``HuggingFaceStorageWriter``, whose reader takes these files. There is no ``.metadata``, which
would be a pickle. There is no plan of all ranks, because one rank would make it: with 1,024 ranks that takes minutes.
A whole tensor has as many elements as its shards together, so that what a rank allocates for it is what the files hold.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import SettingError, listed
from ..model.safetensors_files import DamagedFileError, SafetensorsFile
from ..topology.dtensor import is_first_holder, local_pieces, local_ranges
from ..topology.index_ranges import IndexRange
from .atomic_folder import CheckpointError
from .safetensors_writer import DTYPES, Entry, write_file

__all__ = [
    "HF",
    "MODEL",
    "OPTIMIZER",
    "SHARDS",
    "STATE",
    "StoredTensor",
    "check_contents",
    "first_held",
    "overlapping",
    "read_facts",
    "read_shards",
    "shard_files",
    "shard_reads",
    "stored_tensors",
    "write_shards",
]

SHARDS, HF, STATE = "dist_ckpt", "huggingface", "trainer_state.json"
MODEL, OPTIMIZER = "model.", "optimizer."  # prefixes of names in SHARDS
# The format's keys of metadata and of a shard's offsets (torch/distributed/checkpoint/_hf_utils.py).
_PLACES, _VERSION, _OFFSET = "DCP_SHARDING_INFO", {"DCP_VERSION": "1.0"}, "saved_offsets"
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        shape: of the whole tensor.
        numel: elements of all its shards.
        file: the first file with a shard of it.
        shards: offset of each wanted shard -> its shape and file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    file: Path
    shards: dict[tuple[int, ...], tuple[tuple[int, ...], Path]] = field(default_factory=dict)


def first_held(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return the tensors whose shards a rank writes: of ranks with the same shard, the first.

    Replicas share the writing: each writes an equal number of the tensors that all hold.
    """
    return {name: t for i, (name, t) in enumerate(tensors.items()) if is_first_holder(t, rank, replica=i)}


def shard_files(
    tensors: Mapping[str, torch.Tensor], number: int, ranks: int
) -> dict[str, dict[str, tuple[IndexRange, torch.Tensor]]]:
    """Return the files that a rank writes, by name: its range of each tensor, and the values, views.

    The rank's file has a ``number`` from 1 to ``ranks``. A rank with two ranges of a tensor (gate and up) writes the
    second to another file, because names in a file are unique.
    """
    files: dict[str, dict[str, tuple[IndexRange, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        pieces = (piece for piece in local_pieces(tensor.detach()) if piece[0].numel or not tensor.numel())
        for nth, piece in enumerate(pieces):
            files.setdefault(f"shard-{number + nth * ranks:05d}-model-00001-of-00001.safetensors", {})[name] = piece
    return files


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], number: int, ranks: int) -> None:
    """Write this rank's shards of tensors (``shard_files``); not collective."""
    for file, held in shard_files(tensors, number, ranks).items():
        entries = [Entry(name, tuple(values.shape), values.dtype) for name, (_, values) in held.items()]
        places = {name: {_OFFSET: range_.low} for name, (range_, _) in held.items()}
        values = ((name, values.cpu()) for name, (_, values) in held.items())
        write_file(folder / file, entries, values, {_PLACES: json.dumps(places), **_VERSION})


def stored_tensors(
    folder: Path, is_wanted: Callable[[str, IndexRange], bool] = lambda name, shard: True
) -> dict[str, StoredTensor]:
    """Return the tensors in a folder of shards by name, from the files' headers.

    Args:
        is_wanted: whether to keep the place of a shard, by its tensor's name and its range.

    Raises:
        CheckpointError: a file is damaged, or shards do not make up whole tensors; names the file.
    """
    found: dict[str, StoredTensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            _collect(SafetensorsFile(path), found, is_wanted)
    except DamagedFileError as error:
        raise CheckpointError(f"{error.path.parent}: {error}.") from error
    wrong = [name for name, tensor in found.items() if math.prod(tensor.shape) != tensor.numel]
    if wrong:
        raise CheckpointError(f"{folder}: its shards do not make up whole tensors: {listed(wrong)}.")
    return found


def overlapping(tensors: Mapping[str, torch.Tensor]) -> Callable[[str, IndexRange], bool]:
    """Return a filter for ``stored_tensors``: the shards with values that this rank loads into ``tensors``.

    An optimizer state with its parameter's dims is sharded like the parameter. Other tensors are small.
    """
    held = {name: local_ranges(tensor) for name, tensor in tensors.items()}

    def is_wanted(name: str, shard: IndexRange) -> bool:
        own = name.removeprefix(MODEL) if name.startswith(MODEL) else name.removeprefix(OPTIMIZER).rpartition(".")[0]
        ranges = held.get(own, ())
        if not ranges or len(ranges[0].low) != len(shard.low):
            return True
        return any(range_.intersection(shard) is not None for range_ in ranges)

    return is_wanted


def shard_reads(
    stored: Mapping[str, StoredTensor], tensors: Mapping[str, torch.Tensor]
) -> dict[Path, list[tuple[str, tuple[slice, ...], torch.Tensor]]]:
    """Return what this rank reads to fill its shards of tensors, by file: names, slices, and views to read into.

    Raises:
        CheckpointError: shards lack values of a tensor.
    """
    reads: dict[Path, list[tuple[str, tuple[slice, ...], torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        for held, values in local_pieces(tensor.detach()):
            missing = held.numel
            for offset, (shape, path) in stored[name].shards.items():
                shard = _range(offset, shape)
                both = held.intersection(shard)
                if both is not None:
                    into = values[both.slices_in(held)]
                    reads.setdefault(path, []).append((name, both.slices_in(shard), into))
                    missing -= both.numel
            if missing:
                raise CheckpointError(f"{stored[name].file.parent}: its shards do not make up whole tensors: {name}.")
    return reads


def read_shards(stored: Mapping[str, StoredTensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's shards of tensors in place, by ``shard_reads``; opens each file once."""
    try:
        for path, parts in shard_reads(stored, tensors).items():
            file = SafetensorsFile(path)
            for name, index, into in parts:
                into.copy_(file.read(name, index))
    except DamagedFileError as error:
        raise CheckpointError(f"{error.path.parent}: {error}.") from error


def check_contents(folder: Path, contents: Collection[str], node: str = "checkpoint") -> set[str]:
    """Check that a run can resume by loading ``contents`` of a checkpoint, and return what the checkpoint holds.

    Args:
        node: the role's node of checkpoint settings, as users type it.

    Raises:
        SettingError: the checkpoint has no weights or no optimizer state to load, or its weights are not loaded. Then a
            run would continue from its step with the weights of ``model.path``.
        CheckpointError: it is damaged.
    """
    facts, files, setting = read_facts(folder), sorted((folder / SHARDS).glob("*.safetensors")), f"{node}.load_contents"
    try:
        has_model = any(name.startswith(MODEL) for file in files for name in SafetensorsFile(file).shapes)
    except DamagedFileError as error:
        raise CheckpointError(f"{error.path.parent}: {error}.") from error
    found = {"model": has_model, "optimizer": facts["param_groups"] is not None, "extra": bool(facts["lr_scheduler"])}
    resumed = [content for content, is_there in found.items() if is_there]
    held = set(resumed)
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
    """Return the content of ``trainer_state.json``, or raise ``CheckpointError``."""
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


def _collect(
    file: SafetensorsFile, found: dict[str, StoredTensor], is_wanted: Callable[[str, IndexRange], bool]
) -> None:
    """Add a file's shards to their tensors."""
    places = _places(file)
    for name, shape in file.shapes.items():
        offset = places.get(name, {}).get(_OFFSET) if places is not None else [0] * len(shape)
        has_dims = isinstance(offset, list) and len(offset) == len(shape)
        if not has_dims or not all(type(at) is int and 0 <= at < 2**62 for at in offset):
            raise DamagedFileError(file.path, f"it does not say where in the whole tensor its {name} lies")
        shard, numel = _range(tuple(offset), shape), math.prod(shape)
        tensor = found.get(name)
        if tensor is None:
            dtype = _DTYPES.get(file.dtype(name))
            if dtype is None:
                raise DamagedFileError(file.path, f"{name} has a dtype that no checkpoint of this engine has")
            tensor = found[name] = StoredTensor(dtype, shard.high, 0, file.path)
        elif len(shape) != len(tensor.shape):
            raise DamagedFileError(file.path, f"another file holds a {name} with another number of dims")
        if shard.low in tensor.shards and numel:
            raise DamagedFileError(file.path, f"another file holds the same shard of {name}")
        tensor.shape = tuple(map(max, tensor.shape, shard.high))
        tensor.numel += numel
        if numel and is_wanted(name, shard):
            tensor.shards[shard.low] = (shape, file.path)


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


def _range(offset: tuple[int, ...], shape: tuple[int, ...]) -> IndexRange:
    return IndexRange(offset, tuple(at + size for at, size in zip(offset, shape, strict=True)))
