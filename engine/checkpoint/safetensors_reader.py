"""Open and check the safetensors files of a Hugging Face checkpoint, and download them from the hub."""

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import SettingError
from ..model.safetensors_files import DamagedFileError, SafetensorsFile, check_within
from ..model_files import PATTERNS
from ..topology.rank_consistency import gathered, raise_on_all_ranks
from .safetensors_writer import DTYPES

__all__ = ["HUB_ID", "CheckpointFiles", "check_files", "local_checkpoint", "missing_weights", "open_checkpoint"]

_SETTING = "actor_rollout_ref.model.path"
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_DOWNLOADED: dict[str, Any] = {
    "allow_patterns": ["*.safetensors", *PATTERNS],  # a save copies the small files
    "ignore_patterns": ["*/*.safetensors", "consolidated*.safetensors"],  # other formats of the same weights
}
_POLL_SECONDS = 10.0


@dataclass(frozen=True)
class CheckpointFiles:
    """Maps each tensor of a checkpoint to its file. An open file is memory-mapped.

    Args:
        unread: files of weights beside them in the folder, which transformers does not read either.
    """

    folder: Path
    file_of: Mapping[str, str]
    unread: tuple[str, ...]
    _open: dict[str, SafetensorsFile] = field(repr=False, compare=False)

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
        """Return the file of a tensor, opened again if ``open_checkpoint`` could not open it.

        Raises:
            DamagedFileError: it can't be read, or lacks the tensor, which the index lists.
        """
        name = self.file_of[key]
        if name not in self._open:
            self._open[name] = SafetensorsFile(self.folder / name)
        file = self._open[name]
        if key not in file.shapes:
            raise DamagedFileError(file.path, f"it lacks {key}, which the index lists")
        return file


def local_checkpoint(path: str, revision: str | None = None, device: torch.device | str = "cpu") -> str:
    """Return the folder of a checkpoint that is given as a folder or as an id on the Hugging Face hub; collective.

    verl passes a hub id on unchanged. The hub is asked only where its cache lacks files, by one rank of each host.

    Args:
        revision: the commit of the model's config, so that the weights are those of the same commit.

    Raises:
        SettingError: files are not in the cache, and ``HF_HUB_OFFLINE`` forbids to download them.
        Exception: the hub's error, if it is the same on all ranks, else RankMismatchError.
    """
    if os.path.isdir(path) or not HUB_ID.fullmatch(path):
        return path
    folder, lacking = "", [""]
    with raise_on_all_ranks(device):
        names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, CONFIG_NAME)
        cached = (try_to_load_from_cache(path, name, revision=revision) for name in names)
        folder = os.path.dirname(next((file for file in cached if isinstance(file, str)), ""))
        lacking = missing_weights(path, folder)
    # LOCAL_RANK is 0 on each of verl's Ray workers, so hosts are compared.
    mine = (socket.gethostname(), bool(lacking))
    everyone = gathered(mine)
    if any(lacks for _, lacks in everyone):
        _download(path, revision, bool(lacking) and everyone.index(mine) == dist.get_rank(), device)
        with raise_on_all_ranks(device):
            if lacking:
                folder = snapshot_download(path, revision=revision, local_files_only=True, **_DOWNLOADED)
    return folder


def missing_weights(hub_id: str, folder: str) -> list[str]:
    """List the files of weights that a snapshot in the hub's cache lacks, of those that transformers reads.

    Args:
        folder: the snapshot; empty if the cache has none.

    Raises:
        SettingError: it lacks some, and ``HF_HUB_OFFLINE`` forbids to download them.
    """
    lacking = [f"{SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}"]
    if folder and os.path.isfile(os.path.join(folder, SAFE_WEIGHTS_NAME)):
        lacking = []
    elif folder and os.path.isfile(os.path.join(folder, SAFE_WEIGHTS_INDEX_NAME)):
        with _as_setting():
            shards = sorted(set(_weight_map(Path(folder)).values()))
        lacking = [shard for shard in shards if not os.path.isfile(os.path.join(folder, shard))]
    if lacking and constants.HF_HUB_OFFLINE:
        where = f"its snapshot {folder}" if folder else f"the cache {constants.HF_HUB_CACHE}"
        rule = f"{where} lacks {', '.join(lacking[:3])}, which HF_HUB_OFFLINE forbids to download."
        works = f"a cache that `hf download {hub_id}` has filled on this machine, or the model's folder"
        raise SettingError(_SETTING, hub_id, rule, works)
    return lacking


def open_checkpoint(folder: str | Path) -> CheckpointFiles:
    """Find the safetensors of a Hugging Face checkpoint, and their tensors by the headers alone.

    These are the files that transformers reads: ``model.safetensors``, or those that the index names, with all their
    tensors. Without either of them, all safetensors of the folder are. A file of the index that is missing or damaged
    is left to ``check_files``, or to the first read of it.

    Raises:
        SettingError: the folder is missing or holds no safetensors, a file can't be read, or two files have a tensor of
            the same name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise SettingError(_SETTING, folder, "is not a folder.", "the folder of a Hugging Face checkpoint")
    _check_config(folder)
    there = sorted(path.name for pattern in _WEIGHTS for path in folder.glob(pattern))
    weight_map: dict[str, str] = {}
    opened: dict[str, SafetensorsFile] = {}
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        with _as_setting():
            weight_map = _weight_map(folder)
        names = sorted(set(weight_map.values()))
        _check_one_set(folder, names)
        for name in names:
            with suppress(DamagedFileError):
                opened[name] = SafetensorsFile(folder / name)
    else:
        names = [SAFE_WEIGHTS_NAME] if SAFE_WEIGHTS_NAME in there else [n for n in there if n.endswith(".safetensors")]
        with _as_setting():
            opened = {name: SafetensorsFile(folder / name) for name in names}
    if not names:
        works = "a checkpoint saved with safetensors (model.save_pretrained writes them)"
        raise SettingError(_SETTING, folder, "has no *.safetensors file.", works)
    file_of: dict[str, str] = {}
    for name, file in opened.items():
        for key in file.shapes:
            if key in file_of:
                rule = f"{key} stands in two of its files, {file_of[key]} and {name}."
                raise SettingError(_SETTING, folder, rule, "a folder that has only the one that belongs to the model")
            file_of[key] = name
    return CheckpointFiles(folder, weight_map | file_of, tuple(name for name in there if name not in names), opened)


def check_files(checkpoint: CheckpointFiles) -> None:
    """Raise ``SettingError`` with the first file that is missing or damaged, by the headers alone."""
    names = sorted(set(checkpoint.file_of.values()))
    missing = [name for name in names if not (checkpoint.folder / name).is_file()]
    if missing:
        rule = f"its index names {', '.join(missing[:3])}, which {'is' if len(missing) == 1 else 'are'} not there."
        raise SettingError(_SETTING, checkpoint.folder, rule, "a complete checkpoint")
    for key in checkpoint.file_of:
        checkpoint.shape(key)


def _check_config(folder: Path) -> None:
    """Raise ``SettingError`` if the config names a weight file that transformers reads and vLLM does not."""
    try:
        named = json.loads((folder / CONFIG_NAME).read_text()).get("transformers_weights")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if named not in (None, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        rule = f"its config.json has transformers_weights={named}, which transformers reads and vLLM does not."
        raise SettingError(_SETTING, folder, rule, f"the weights as {SAFE_WEIGHTS_NAME}, and a config.json without it")


def _check_one_set(folder: Path, of_index: list[str]) -> None:
    """Raise ``SettingError`` if the folder has an index's files beside a single file that transformers prefers."""
    others = [name for name in of_index if name != SAFE_WEIGHTS_NAME and (folder / name).is_file()]
    if others and (folder / SAFE_WEIGHTS_NAME).is_file():
        rule = f"it has {SAFE_WEIGHTS_NAME}, which transformers reads, and {others[0]} of its index, which vLLM reads."
        raise SettingError(_SETTING, folder, rule, f"a folder with one of the two, {SAFE_WEIGHTS_NAME} or the index")


def _download(hub_id: str, revision: str | None, on_this_rank: bool, device: torch.device | str) -> None:
    """Download weights on some ranks; collective.

    The others wait in short collectives, because a long one would end by its time-out before most downloads do.
    """
    with ThreadPoolExecutor(1) as pool:
        ask = partial(snapshot_download, hub_id, revision=revision, **_DOWNLOADED)
        download = pool.submit(ask) if on_this_rank else None
        running = torch.ones((), dtype=torch.int32, device=device)
        while running:
            if download is not None:
                wait([download], timeout=_POLL_SECONDS)
            running.fill_(download is not None and not download.done())
            dist.all_reduce(running, dist.ReduceOp.MAX)
    with raise_on_all_ranks(device):
        if download is not None:
            download.result()


def _weight_map(folder: Path) -> dict[str, str]:
    """Return an index's map of tensors to files; ``DamagedFileError`` if it is none, or names a file elsewhere."""
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


@contextmanager
def _as_setting() -> Iterator[None]:
    try:
        yield
    except DamagedFileError as error:
        works = "the same checkpoint downloaded or copied again, or saved again with model.save_pretrained"
        raise SettingError(_SETTING, error.path.parent, f"{error}.", works) from error
