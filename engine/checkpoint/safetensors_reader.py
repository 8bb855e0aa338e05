"""Open and check the safetensors files of a Hugging Face checkpoint, and download them from the hub."""

import json
import math
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

from ..errors import SettingError
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
    _open: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of one tensor, from the file's header."""
        return tuple(self._file(key).get_slice(key).get_shape())

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of one tensor, from the file's header."""
        return _DTYPES[self._file(key).get_slice(key).get_dtype()]

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read one tensor, or the slices ``index`` of it; only those bytes are read."""
        return self._file(key).get_slice(key)[index] if index else self._file(key).get_tensor(key)

    def _file(self, key: str) -> Any:
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
        try:
            weight_map = dict(json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text())["weight_map"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _damaged(folder / SAFE_WEIGHTS_INDEX_NAME, f"{type(error).__name__}: {error}") from error
        return CheckpointFiles(folder, weight_map)
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
        with _opened(file) as handle:
            file_of.update(dict.fromkeys(handle.keys(), file.name))
    return CheckpointFiles(folder, file_of)


def check_files(checkpoint: CheckpointFiles) -> None:
    """Check that all files exist and are complete, by their headers alone.

    Raises:
        SettingError: naming the first file that is missing or damaged.
    """
    keys_of: dict[str, list[str]] = {}
    for key, name in checkpoint.file_of.items():
        keys_of.setdefault(name, []).append(key)
    missing = [name for name in sorted(keys_of) if not (checkpoint.folder / name).is_file()]
    if missing:
        rule = f"its index names {', '.join(missing[:3])}, which {'is' if len(missing) == 1 else 'are'} not there."
        raise SettingError(_SETTING, checkpoint.folder, rule, "a complete checkpoint")
    for name, keys in keys_of.items():
        with _opened(checkpoint.folder / name) as handle:
            lacking = set(keys) - set(handle.keys())
        if lacking:
            raise _damaged(checkpoint.folder / name, f"it lacks {min(lacking)}, which the index lists")


def _opened(path: Path) -> Any:
    """Open a file; safetensors checks the header against the file's size.

    Raises:
        SettingError: it can't be read.
    """
    try:
        path.open("rb").close()  # safetensors reports any error of open() as a missing file
        return safe_open(path, framework="pt")
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    except SafetensorError as error:
        raise _damaged(path, _fault(path) or str(error)) from error


def _damaged(path: Path, fault: str) -> SettingError:
    works = "the same checkpoint downloaded or copied again, or saved again with model.save_pretrained"
    return SettingError(_SETTING, path.parent, f"{path.name} can't be read: {fault}.", works)


def _fault(path: Path) -> str:
    """Describe what is wrong with a safetensors file; empty if that is not known."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(64)
        if begin.startswith(b"version https://git-lfs"):
            return "it is a Git LFS pointer (git lfs pull fetches the file itself)"
        if size < 8:
            return f"it has {size} bytes"
        length = int.from_bytes(begin[:8], "little")
        if size < 8 + length:
            return f"its header should have {length} bytes, and the file has {size}: it is cut off, or no safetensors"
        file.seek(8)
        try:
            tensors = {name: at for name, at in json.loads(file.read(length)).items() if name != "__metadata__"}
            at = 0
            for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
                begins, ends = tensor["data_offsets"]
                bits = re.search(r"\d+", tensor["dtype"])
                nbytes = math.prod(tensor["shape"]) * (int(bits[0]) if bits else 8) // 8
                if begins != at:
                    return f"{name} begins at byte {begins} of its data, and what is before it ends at {at}"
                if ends - begins != nbytes:
                    return f"{name} is {tensor['dtype']} {tensor['shape']}, and has {ends - begins} bytes"
                at = ends
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return f"its header is damaged ({type(error).__name__}: {error})"
    if size != 8 + length + at:
        cut = ": it is cut off" if size < 8 + length + at else ""
        return f"its tensors end at byte {8 + length + at}, and the file has {size}{cut}"
    return ""
