"""Open safetensors files that anybody may have written: each fault is one error, with the file's name.

safetensors itself compares the header with the file. It refuses headers over 100 MB, tensors that overlap, leave gaps
or end outside of the file, and sizes that contradict shape and dtype. So a read has at most the file's size. A tensor
that the header names twice (safetensors takes the last), or with a shape or dtype that torch lacks, is refused here.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

__all__ = ["DamagedFileError", "SafetensorsFile", "check_within"]

# The longest header that a fault is looked for in; it is parsed in Python, which takes some twenty times the memory.
_DESCRIBED_BYTES = 8 << 20
_MOST_ELEMENTS, _MOST_DIMS = 2**63, 64  # of a tensor of torch


class DamagedFileError(ValueError):
    """A file (``path``) can't be read; the text has its name and the reason (``fault``)."""

    def __init__(self, path: Path, fault: str):
        super().__init__(path, fault)
        self.path, self.fault = path, fault

    def __str__(self) -> str:
        return f"{self.path.name} can't be read: {self.fault}"


class SafetensorsFile:
    """An open file, memory-mapped, with the ``shapes`` of its tensors by name.

    Raises:
        DamagedFileError: from the constructor and from every method.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            path.open("rb").close()  # safetensors reports any error of open() as a missing file
            self._file: Any = safe_open(path, framework="pt")
        except OSError as error:
            raise DamagedFileError(path, error.strerror or str(error)) from error
        except SafetensorError as error:
            raise DamagedFileError(path, _fault(path) or str(error)) from error
        names = list(self._file.keys())
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
        # A quotation mark inside of a name is escaped in JSON, so this is the key of each entry and nothing else.
        if header.count(b'"data_offsets"') != len(names):
            raise DamagedFileError(path, "its header names a tensor more than once")
        self.shapes: dict[str, tuple[int, ...]] = {n: tuple(self._file.get_slice(n).get_shape()) for n in names}
        for name, shape in self.shapes.items():
            if len(shape) > _MOST_DIMS or math.prod(size or 1 for size in shape) >= _MOST_ELEMENTS:
                raise DamagedFileError(path, f"{name} has a shape that torch has no tensor of")

    def metadata(self) -> dict[str, str]:
        return self._file.metadata() or {}

    def dtype(self, key: str) -> str:
        """Return the dtype of a tensor by the name that safetensors has for it."""
        return self._file.get_slice(key).get_dtype()

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read a tensor, or the slices ``index`` of it; only those bytes are read."""
        try:
            return self._file.get_slice(key)[index] if index else self._file.get_tensor(key)
        except (SafetensorError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise DamagedFileError(self.path, f"{key}: {type(error).__name__}: {error}") from error


def check_within(folder: Path, name: Any) -> Path:
    """Return the path of a file below the folder; ``DamagedFileError`` if the name is none of such a file."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise DamagedFileError(folder, f"{str(name)[:80]!r} is no name of a file")
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DamagedFileError(folder, f"{name[:80]} lies outside of the folder")
    return folder / name


def _fault(path: Path) -> str:
    """Describe a fault of a safetensors file; empty for those that safetensors describes."""
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
        if length > _DESCRIBED_BYTES:
            return ""
        file.seek(8)
        try:
            tensors = {name: at for name, at in json.loads(file.read(length)).items() if name != "__metadata__"}
            end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            return f"its header is damaged ({type(error).__name__}: {error})"
    if size != end:
        return f"its tensors end at byte {end}, and the file has {size}{': it is cut off' if size < end else ''}"
    return ""  # safetensors names a tensor whose offsets contradict its shape, its dtype or another tensor's
