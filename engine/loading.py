"""Hugging Face safetensors -> the shards of this rank.

Nothing is broadcast and no tensor is held whole that a rank needs a part of, where the file layout allows: a rank opens
the files and reads its experts of a stack and its rows of a dense weight. Names and layouts go through transformers'
own weight converters (``core_model_loading.py``), on the owned experts only.
"""

import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from .errors import SettingError
from .mesh import Meshes
from .shards import box_of, checkpointed, local_tensor

__all__ = ["CheckpointFiles", "load_weights", "local_checkpoint", "open_checkpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FIRST = 5  # how many offenders an error lists


@dataclass(frozen=True)
class CheckpointFiles:
    """Where each tensor of a checkpoint is."""

    folder: Path
    file_of: Mapping[str, str]

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of one tensor, from the file's header."""
        with safe_open(self.folder / self.file_of[key], framework="pt") as file:
            return tuple(file.get_slice(key).get_shape())

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read one tensor, or the part of it that ``index`` cuts; only those bytes are touched."""
        with safe_open(self.folder / self.file_of[key], framework="pt") as file:
            return file.get_slice(key)[index] if index else file.get_tensor(key)


def local_checkpoint(path: str) -> str:
    """The folder of a checkpoint given as a folder or as an id on the Hugging Face hub; collective.

    verl hands a hub id on as it is. One rank of each node downloads, the others find it in the cache.
    """
    if os.path.isdir(path) or not _HUB_ID.fullmatch(path):
        return path
    wanted = ["*.safetensors", "*.safetensors.index.json"]
    if int(os.environ.get("LOCAL_RANK", 0)) == 0 or dist.get_rank() == 0:
        snapshot_download(path, allow_patterns=wanted)
    dist.barrier()
    return snapshot_download(path, allow_patterns=wanted, local_files_only=True)


def open_checkpoint(folder: str | Path) -> CheckpointFiles:
    """Find the safetensors of a Hugging Face checkpoint.

    Raises:
        SettingError: if the folder is missing or holds no safetensors.
    """
    folder = Path(folder)
    setting = "actor_rollout_ref.model.path"
    if not folder.is_dir():
        raise SettingError(setting, folder, "is not a folder.", "the folder of a Hugging Face checkpoint")
    if (folder / _INDEX).is_file():
        return CheckpointFiles(folder, json.loads((folder / _INDEX).read_text())["weight_map"])
    files = [folder / _SINGLE] if (folder / _SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise SettingError(
            setting,
            folder,
            "has no *.safetensors file.",
            "a checkpoint saved with safetensors (model.save_pretrained writes them)",
        )
    file_of: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            file_of.update(dict.fromkeys(handle.keys(), file.name))
    return CheckpointFiles(folder, file_of)


@dataclass
class _Source:
    """How one target tensor comes from checkpoint tensors: a plain copy, or a converter over lists of them."""

    converter: WeightConverter | None = None
    keys: list[tuple[str | None, str]] = field(default_factory=list)
    """(source pattern of the converter, checkpoint key), in natural order."""


def load_weights(
    model: nn.Module,
    files: CheckpointFiles,
    meshes: Meshes,
    initialize: Callable[[str, torch.Tensor, bool], bool] = lambda name, tensor, fits: False,
    progress: bool = False,
) -> list[str]:
    """Fill the parameters and persistent buffers of a sharded, materialised model from a checkpoint.

    Args:
        initialize: called with name, local tensor and whether the checkpoint has it in the model's shape; fills the
            tensor and returns True, or returns False to have it read, or reported if it is missing or ill-shaped.
        progress: show a bar.

    Returns:
        Names of what the checkpoint has and the model has no place for.

    Raises:
        ValueError: naming the first missing or ill-shaped tensors.
    """
    sources = _plan(model, files)
    targets = checkpointed(model)

    missing = []
    with torch.no_grad():
        for name, target in tqdm(targets.items(), desc="Loading weights", disable=not progress):
            if initialize(name, local_tensor(target), _fits(target, sources.get(name), files)):
                continue
            if name in sources:
                _fill(name, target, sources[name], model, files, meshes)
            else:
                missing.append(name)
    if missing:
        raise ValueError(
            f"{files.folder} lacks {len(missing)} tensors that {type(model).__name__} needs, first: "
            f"{', '.join(missing[:_FIRST])}."
        )
    known = model.state_dict().keys()
    return [name for name in sources if name not in known]


def _plan(model: nn.Module, files: CheckpointFiles) -> dict[str, _Source]:
    """For each target name the checkpoint tensors it is made of; no tensor is read."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    known = model.state_dict()
    prefix = model.base_model_prefix

    sources: dict[str, _Source] = {}
    for key in sorted(files.file_of, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix=prefix, meta_state_dict=known)
        if name not in known and key in known:
            name, pattern = key, None
        converter = by_pattern[pattern] if pattern is not None else None
        for target in _targets(name, converter):
            sources.setdefault(target, _Source(converter)).keys.append((pattern, key))
    return sources


def _targets(name: str, converter: WeightConverter | None) -> list[str]:
    """A converter names its first target; it may make several."""
    if converter is None:
        return [name]
    first = converter.target_patterns[0]
    return [name.replace(first, pattern) for pattern in converter.target_patterns]


def _fits(target: torch.Tensor, source: _Source | None, files: CheckpointFiles) -> bool:
    """Whether the checkpoint has the tensor; in its shape, where no converter makes it."""
    if source is None or source.converter is not None:
        return source is not None
    return tuple(files.shape(source.keys[-1][1])) == tuple(target.shape)


def _fill(
    name: str, target: torch.Tensor, source: _Source, model: nn.Module, files: CheckpointFiles, meshes: Meshes
) -> None:
    """Read what this rank holds of ``target`` and copy it there."""
    local = local_tensor(target)
    box = box_of(target, meshes.topology, meshes.fsdp_rank)
    if source.converter is not None:
        local.copy_(_convert(name, target, source, box, model, files))
        return
    key = source.keys[-1][1]
    _check_shape(files, name, target.shape, files.shape(key), key)
    if local.numel():
        local.copy_(files.read(key, box if isinstance(target, DTensor) else None))


def _convert(
    name: str, target: torch.Tensor, source: _Source, box: tuple[slice, ...], model: nn.Module, files: CheckpointFiles
) -> torch.Tensor:
    """Run transformers' converter, on the owned experts alone where the checkpoint stores them one by one."""
    by_pattern: dict[str | None, list[str]] = {}
    for pattern, key in source.keys:
        by_pattern.setdefault(pattern, []).append(key)
    one_by_one = any(len(keys) > 1 for keys in by_pattern.values())
    owned = box[0] if one_by_one else slice(None)

    converter = copy.deepcopy(source.converter)
    assert converter is not None
    for pattern, keys in by_pattern.items():
        if one_by_one:
            keys = _owned_keys(name, keys, target.shape[0], len(converter.target_patterns), owned, files)
        for key in keys:
            converter.add_tensor(name, key, pattern, partial(files.read, key))
    if one_by_one and owned.start == owned.stop:
        return torch.empty([s.stop - s.start for s in box], dtype=target.dtype)  # target may be a DTensor
    made = converter.convert(name, model=model, config=model.config)
    value = made[name]
    value = value[0] if isinstance(value, list) else value
    experts = owned.stop - owned.start if one_by_one else target.shape[0]
    _check_shape(files, name, (experts, *target.shape[1:]), tuple(value.shape), source.keys[0][1])
    return value[(slice(None), *box[1:])] if one_by_one else value[box]


def _owned_keys(
    name: str, keys: list[str], experts: int, targets: int, owned: slice, files: CheckpointFiles
) -> list[str]:
    """The wanted ones of one tensor per expert; a converter with several targets deals them out in equal parts."""
    if len(keys) != targets * experts:
        raise ValueError(
            f"{files.folder}: {name} stacks {experts} experts, but the checkpoint has {len(keys)} tensors like "
            f"{keys[0]}."
        )
    return [key for i in range(targets) for key in keys[i * experts : (i + 1) * experts][owned]]


def _check_shape(files: CheckpointFiles, name: str, wanted: tuple[int, ...], found: tuple[int, ...], key: str) -> None:
    if tuple(wanted) != tuple(found):
        raise ValueError(
            f"{files.folder}: {name} of the model has the shape {tuple(wanted)}, but {key} and its likes give "
            f"{tuple(found)}."
        )
