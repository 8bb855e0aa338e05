"""Write safetensors files tensor by tensor, so that only one has to be in memory.

The format (https://huggingface.co/docs/safetensors): the length of a JSON header in eight bytes, the header, the
tensors. The header has dtype, shape and offsets of each tensor.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

__all__ = ["DTYPES", "Entry", "split_into_files", "write_file", "write_index", "write_safetensors"]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_T = TypeVar("_T")


@dataclass(frozen=True)
class Entry:
    """Name, shape and dtype of a tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    folder: Path, entries: Sequence[Entry], tensors: Iterable[tuple[str, torch.Tensor]], file_bytes: int
) -> None:
    """Write tensors into files of at most ``file_bytes``, with names and index as ``from_pretrained`` expects them.

    Args:
        tensors: names and tensors on the CPU, in the order of ``entries``; one is held at a time.

    Raises:
        ValueError: a tensor does not match its entry, or there are too few.
    """
    files = split_into_files(entries, lambda entry: entry.nbytes, file_bytes)
    coming = iter(tensors)
    for name, members in zip(write_index(folder, files), files, strict=True):
        write_file(folder / name, members, coming)


def write_index(folder: Path, files: Sequence[Sequence[Entry]]) -> list[str]:
    """Return the file names that ``from_pretrained`` expects; write the index if there are several files."""
    if len(files) == 1:
        return [SAFE_WEIGHTS_NAME]
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    weight_map = {entry.name: name for name, members in zip(names, files, strict=True) for entry in members}
    index = {"metadata": {"total_size": sum(e.nbytes for file in files for e in file)}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
    return names


def write_file(
    path: Path,
    entries: Sequence[Entry],
    tensors: Iterator[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one file with as many of the tensors as there are entries.

    Raises:
        ValueError: a tensor does not match its entry, or there are too few.
    """
    with path.open("wb") as file:
        file.write(_header(entries, metadata or {}))
        for entry in entries:
            found, tensor = next(tensors, ("nothing", torch.empty(0)))
            if (found, tuple(tensor.shape), tensor.dtype) != (entry.name, entry.shape, entry.dtype):
                raise ValueError(f"{path.name} expects {entry}, but got {found}.")
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def split_into_files(tensors: Iterable[_T], nbytes: Callable[[_T], int], file_bytes: int) -> list[list[_T]]:
    """Split tensors into files, in order; one that is larger than ``file_bytes`` gets a file of its own."""
    files: list[list[_T]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + nbytes(tensor) > file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += nbytes(tensor)
    return files


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Mapping] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for entry in entries:
        ends = at + entry.nbytes
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": (at, ends)}
        at = ends
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned to eight bytes
    return len(text).to_bytes(8, "little") + text
