"""Write checkpoint folders atomically, and verify them.

A folder is written under a name that ends in ``.partial``. When every rank has written its part, a manifest lists all
files with their sizes and checksums, and the folder is renamed. A save that is killed at any moment leaves the previous
folder, or none.
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import listed
from ..model.safetensors_files import check_within
from ..topology.rank_consistency import gathered, raise_on_all_ranks

__all__ = [
    "FORMAT",
    "MANIFEST",
    "CheckpointError",
    "verify_files",
    "verify_all_ranks",
    "atomic_dir",
    "atomic_dir_all_ranks",
    "complete_dir",
    "copy_files",
    "file_facts",
    "file_names",
    "partial_dir",
]

FORMAT = 2
MANIFEST = "epfsdp2_checkpoint.json"
_CHUNK = 16 << 20


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or does not fit; the message names the folder and the first faulty files or tensors."""


@contextlib.contextmanager
def atomic_dir_all_ranks(
    folder: Path, device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None
) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``folder`` once all ranks have left the block; collective.

    Run code that may fail on one rank alone inside ``raise_on_all_ranks``, because the other ranks would wait for it.

    Raises:
        RankMismatchError: with the errors of the ranks that failed; ``folder`` is unchanged then.
    """
    partial, is_first = partial_dir(folder), dist.get_rank() == 0
    with raise_on_all_ranks(device, group):
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    try:
        yield partial
        dist.barrier(group)
        mine: dict[str, dict[str, int]] = {}
        with raise_on_all_ranks(device, group):
            mine = {name: file_facts(partial / name, sync=True) for name in _share(file_names(partial))}
        files = {name: facts for part in gathered(mine, group) for name, facts in part.items()}
        with raise_on_all_ranks(device, group):
            if is_first:
                complete_dir(folder, files)
    except BaseException:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)  # frees the disk space
        raise


@contextlib.contextmanager
def atomic_dir(folder: Path, manifest: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``folder`` after the block, with a ``manifest`` or not; in one process."""
    partial = partial_dir(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if manifest:
            _write_manifest(partial, {name: file_facts(partial / name, sync=True) for name in file_names(partial)})
        _replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def complete_dir(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Write the manifest of ``partial_dir(folder)``, with the ``file_facts`` of each file, and rename it."""
    _write_manifest(partial_dir(folder), files)
    _replace(partial_dir(folder), folder)


def verify_all_ranks(folder: Path, device: torch.device | str = "cpu") -> None:
    """Verify every file against the manifest, each rank a part of the files; collective.

    Raises:
        CheckpointError: on every rank, if there is no checkpoint, it has another format, or files are missing,
            truncated or damaged.
    """
    with raise_on_all_ranks(device):
        if dist.get_rank() == 0 and not folder.exists() and (partial_dir(folder) / MANIFEST).is_file():
            partial_dir(folder).replace(folder)  # the save was killed between its last two steps
    wrong: list[str] = []
    with raise_on_all_ranks(device):
        files = _manifest(folder)["files"]
        wrong = _faults(folder, {name: files[name] for name in _share(files)})
    _raise_for(folder, sorted(entry for part in gathered(wrong) for entry in part))


def verify_files(folder: Path, checksums: bool = True) -> None:
    """Verify every file against the manifest, in one process; without ``checksums`` as fast as listing the folder."""
    _raise_for(folder, _faults(folder, _manifest(folder)["files"], checksums))


def copy_files(folder: Path, out: Path, *ignored: str) -> None:
    """Copy a folder's files, except those that match the ``ignored`` patterns.

    Raises:
        CheckpointError: a file links outside the folder, so foreign content would be copied.
    """
    own = folder.resolve()
    linked = [str(path) for path in folder.rglob("*") if path.is_symlink() and not path.resolve().is_relative_to(own)]
    if linked:
        raise CheckpointError(f"{folder} holds links to files outside of it: {listed(sorted(linked))}.")
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(*ignored), dirs_exist_ok=True)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {MANIFEST}: it is no complete checkpoint of this engine.")
    try:
        manifest = json.loads(path.read_text())
        format, files = int(manifest["format"]), dict(manifest["files"])
        for name, facts in files.items() if format == FORMAT else ():
            check_within(folder, name)
            if not {type(facts["bytes"]), type(facts["crc32"])} == {int}:
                raise ValueError(f"{name} has no size and checksum")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if format != FORMAT:
        age = "newer" if format > FORMAT else "older"
        raise CheckpointError(f"{folder} has the {age} format {format}; this version of epfsdp2 reads {FORMAT}.")
    return manifest


def _raise_for(folder: Path, wrong: list[str]) -> None:
    if wrong:
        raise CheckpointError(f"{folder}: {len(wrong)} files are not as saved: {listed(wrong)}.")


def _faults(folder: Path, files: dict[str, dict[str, int]], checksums: bool = True) -> list[str]:
    return [f"{name} ({fault})" for name, facts in files.items() if (fault := _fault(folder / name, facts, checksums))]


def _fault(path: Path, facts: dict[str, int], checksums: bool) -> str:
    """Return the first difference between a file and its manifest entry; empty if there is none."""
    try:
        if not path.is_file():
            return "missing"
        found = path.stat().st_size
        if found != facts["bytes"]:
            return f"{found} of {facts['bytes']} bytes"
        return "" if not checksums or file_facts(path) == facts else "its checksum differs"
    except OSError as error:
        return f"can't be read: {error.strerror}"


def file_facts(path: Path, sync: bool = False) -> dict[str, int]:
    """Return size and checksum of a file; with ``sync``, flush it to the disk first."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
        if sync:
            os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "crc32": checksum}


def _write_manifest(partial: Path, files: dict[str, dict[str, int]]) -> None:
    new = (partial / MANIFEST).with_suffix(".new")
    with new.open("w") as file:
        file.write(json.dumps({"format": FORMAT, "files": files}, indent=1))
        file.flush()
        os.fsync(file.fileno())
    new.replace(partial / MANIFEST)


def _replace(partial: Path, folder: Path) -> None:
    """Rename ``partial`` to ``folder``; at any moment at least one complete folder exists."""
    if folder.exists():
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        folder.replace(old)
        partial.replace(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.replace(folder)
    directory = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def partial_dir(folder: Path) -> Path:
    """Return the temporary path under which a folder is written."""
    return folder.with_name(folder.name + ".partial")


def file_names(folder: Path) -> list[str]:
    """Return the names of all files below a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _share(names: Iterable[str]) -> list[str]:
    """Return this rank's part of a list that is the same on all ranks."""
    return sorted(names)[dist.get_rank() :: dist.get_world_size()]
