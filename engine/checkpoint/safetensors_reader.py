"""Open and check the safetensors files of a Hugging Face checkpoint, and download them from the hub."""

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import SettingError
from ..model.safetensors_files import DamagedFileError, SafetensorsFile, check_within
from ..topology.rank_consistency import raise_on_all_ranks
from .safetensors_writer import DTYPES

__all__ = ["CheckpointFiles", "check_files", "local_checkpoint", "open_checkpoint"]

_SETTING = "actor_rollout_ref.model.path"
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CheckpointFiles:
    """Maps each tensor of a checkpoint to its file. A file stays open, memory-mapped, after its first read."""

    folder: Path
    file_of: Mapping[str, str]
    _open: dict[str, SafetensorsFile] = field(default_factory=dict, repr=False, compare=False)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of one tensor, from the file's header."""
        with _as_setting():
            return self._file(key).shapes[key]

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of one tensor, from the file's header."""
        with _as_setting():
            return _DTYPES[self._file(key).dtype(key)]

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read one tensor, or the slices ``index`` of it; only those bytes are read."""
        with _as_setting():
            return self._file(key).read(key, index)

    def _file(self, key: str) -> SafetensorsFile:
        """Open the file of a tensor.

        Raises:
            SettingError: the file can't be read, is truncated or damaged.
        """
        name = self.file_of[key]
        if name not in self._open:
            self._open[name] = _opened(self.folder / name)
        return self._open[name]


def local_checkpoint(path: str, revision: str | None = None, device: torch.device | str = "cpu") -> str:
    """Return the folder of a checkpoint that is given as a folder or as an id on the Hugging Face hub; collective.

    verl passes a hub id on unchanged. One rank of each host downloads, the others find the files in the cache.

    Args:
        revision: the commit of the model's config, so that the weights are those of the same commit.
        device: device type of the tensors that the default group's backend sends.

    Raises:
        Exception: the error of the hub, if it is the same on all ranks.
        RankMismatchError: on all ranks, if the download failed on some.
    """
    if os.path.isdir(path) or not _HUB_ID.fullmatch(path):
        return path
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())  # LOCAL_RANK is 0 on each of verl's Ray workers
    rank, folder = dist.get_rank(), ""
    wanted = ["*.safetensors", "*.safetensors.index.json"]
    with raise_on_all_ranks(device):
        if hosts.index(hosts[rank]) == rank:
            snapshot_download(path, revision=revision, allow_patterns=wanted)
    with raise_on_all_ranks(device):
        folder = snapshot_download(path, revision=revision, allow_patterns=wanted, local_files_only=True)
    return folder


def open_checkpoint(folder: str | Path) -> CheckpointFiles:
    """Find the safetensors of a Hugging Face checkpoint.

    Raises:
        SettingError: the folder is missing or holds no safetensors, or a file can't be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise SettingError(_SETTING, folder, "is not a folder.", "the folder of a Hugging Face checkpoint")
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        with _as_setting():
            return CheckpointFiles(folder, _weight_map(folder))
    single = folder / SAFE_WEIGHTS_NAME
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise SettingError(
            _SETTING,
            folder,
            "has no *.safetensors file.",
            "a checkpoint saved with safetensors (model.save_pretrained writes them)",
        )
    file_of: dict[str, str] = {}
    for file in files:
        file_of.update(dict.fromkeys(_opened(file).shapes, file.name))
    return CheckpointFiles(folder, file_of)


def check_files(checkpoint: CheckpointFiles) -> None:
    """Check that all files exist and are complete, by their headers alone.

    Raises:
        SettingError: naming the first file that is missing or damaged.
    """
    keys_of: dict[str, set[str]] = {}
    for key, name in checkpoint.file_of.items():
        keys_of.setdefault(name, set()).add(key)
    missing = [name for name in sorted(keys_of) if not (checkpoint.folder / name).is_file()]
    if missing:
        rule = f"its index names {', '.join(missing[:3])}, which {'is' if len(missing) == 1 else 'are'} not there."
        raise SettingError(_SETTING, checkpoint.folder, rule, "a complete checkpoint")
    for name, keys in keys_of.items():
        with _as_setting():
            file = SafetensorsFile(checkpoint.folder / name)
            if lacking := keys - file.shapes.keys():
                raise DamagedFileError(file.path, f"it lacks {min(lacking)}, which the index lists")


def _weight_map(folder: Path) -> dict[str, str]:
    """Map each tensor to its file, as the folder's index does.

    Raises:
        DamagedFileError: it is no index, or names a file outside of the folder.
    """
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    try:
        weight_map: dict[str, Any] = dict(json.loads(path.read_text())["weight_map"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedFileError(path, f"{type(error).__name__}: {error}") from error
    for name in weight_map.values():
        try:
            check_within(folder, name)
        except DamagedFileError as error:
            raise DamagedFileError(path, error.fault) from error
    return weight_map


def _opened(path: Path) -> SafetensorsFile:
    """Open a file.

    Raises:
        SettingError: it can't be read.
    """
    with _as_setting():
        return SafetensorsFile(path)


@contextmanager
def _as_setting() -> Iterator[None]:
    try:
        yield
    except DamagedFileError as error:
        works = "the same checkpoint downloaded or copied again, or saved again with model.save_pretrained"
        raise SettingError(_SETTING, error.path.parent, f"{error}.", works) from error
