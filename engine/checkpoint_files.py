"""The safetensors files of a Hugging Face checkpoint."""

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .agreement import alike
from .errors import SettingError

__all__ = ["CheckpointFiles", "local_checkpoint", "open_checkpoint"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CheckpointFiles:
    """Where each tensor of a checkpoint is. Files stay open, mapped into memory, once one of their tensors was read."""

    folder: Path
    file_of: Mapping[str, str]
    _open: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of one tensor, from the file's header."""
        return tuple(self._file(key).get_slice(key).get_shape())

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read one tensor, or the part of it that ``index`` cuts; only those bytes are touched."""
        return self._file(key).get_slice(key)[index] if index else self._file(key).get_tensor(key)

    def _file(self, key: str) -> Any:
        """
        Raises:
            OSError: naming the file, if it can't be read, is cut off or is damaged.
        """
        name = self.file_of[key]
        if name not in self._open:
            path = self.folder / name
            try:
                path.open("rb").close()  # safetensors says of any file that it can't open that there is none
                self._open[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise OSError(f"{path} can't be read: {error}") from error
        return self._open[name]


def local_checkpoint(path: str, revision: str | None = None, device: torch.device | str = "cpu") -> str:
    """The folder of a checkpoint given as a folder or as an id on the Hugging Face hub; collective.

    verl hands a hub id on as it is. One rank of each host downloads, the others find it in the cache.

    Args:
        revision: the commit that the model's config is of, so that the weights are of the same.
        device: where the default group's backend takes tensors from.

    Raises:
        Exception: of the hub, where all ranks have the same.
        DisagreementError: on all ranks, if the download failed on some.
    """
    if os.path.isdir(path) or not _HUB_ID.fullmatch(path):
        return path
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())  # LOCAL_RANK is 0 on each of verl's Ray workers
    rank, folder = dist.get_rank(), ""
    wanted = ["*.safetensors", "*.safetensors.index.json"]
    with alike(device):
        if hosts.index(hosts[rank]) == rank:
            snapshot_download(path, revision=revision, allow_patterns=wanted)
    with alike(device):
        folder = snapshot_download(path, revision=revision, allow_patterns=wanted, local_files_only=True)
    return folder


def open_checkpoint(folder: str | Path) -> CheckpointFiles:
    """Find the safetensors of a Hugging Face checkpoint.

    Raises:
        SettingError: if the folder is missing or holds no safetensors.
        OSError: if a file can't be read.
    """
    folder = Path(folder)
    setting = "actor_rollout_ref.model.path"
    if not folder.is_dir():
        raise SettingError(setting, folder, "is not a folder.", "the folder of a Hugging Face checkpoint")
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return CheckpointFiles(folder, json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text())["weight_map"])
    single = folder / SAFE_WEIGHTS_NAME
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise SettingError(
            setting,
            folder,
            "has no *.safetensors file.",
            "a checkpoint saved with safetensors (model.save_pretrained writes them)",
        )
    file_of: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                file_of.update(dict.fromkeys(handle.keys(), file.name))
        except (OSError, SafetensorError) as error:
            raise OSError(f"{file} can't be read: {error}") from error
    return CheckpointFiles(folder, file_of)
