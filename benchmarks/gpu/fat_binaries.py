"""Blank the code of other GPUs in a library of CUDA, so that it packs to a tenth.

A section of an ELF file has fat binaries one after the other, each a header ``magic, version, header size, size`` and
entries ``kind, _, header size, payload size, ..., architecture, ...``. Kinds are 1, PTX, and 2, a cubin. These sizes
are of no published format; they were found in files of CUDA 12 and 13, and ``cuobjdump`` reads what is written here.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["blank_other_code"]

_MAGIC = struct.pack("<I", 0xBA55ED50)
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_PTX, _CUBIN = 1, 2
_SMALL_PTX = 1 << 16  # bytes that the driver compiles at once


class _Entry(NamedTuple):
    kind: int
    architecture: int
    whole: bytes  # header and payload


def blank_other_code(library: Path, architecture: int, keeps: Callable[[bytes], bool] = lambda cubin: True) -> int:
    """Leave a library the cubins of one architecture, in place; returns the bytes of code that stay.

    Entries that stay move to the beginning of their fat binary, and zeros follow. ``cuobjdump`` refuses empty ones:
    without a wanted cubin small PTX stays, else the smallest cubin of the library.

    Args:
        architecture: such as 90.
        keeps: whether a cubin of that architecture stays.
    """
    data, left = bytearray(library.read_bytes()), 0
    binaries = {at: list(_entries(data, at)) for at in _fat_binaries(bytes(data))}
    cubins = [entry.whole for entries in binaries.values() for entry in entries if entry.kind == _CUBIN]
    for at, entries in binaries.items():
        own = [entry.whole for entry in entries if (entry.kind, entry.architecture) == (_CUBIN, architecture)]
        ptx = [entry.whole for entry in entries if entry.kind == _PTX and len(entry.whole) < _SMALL_PTX]
        body = b"".join(filter(keeps, own) if own else ptx) or min(cubins, key=len)
        header, size = _sizes(data, at)
        struct.pack_into("<Q", data, at + 8, len(body))
        data[at + header : at + header + size] = body + bytes(size - len(body))
        left += len(body)
    library.write_bytes(data)
    return left


def _fat_binaries(data: bytes) -> Iterator[int]:
    """Yield where each fat binary begins."""
    for name, at, size in _elf_sections(data):
        end = at + size
        while name in _SECTIONS and (found := data.find(_MAGIC, at, end)) >= 0:
            yield found
            at = found + sum(_sizes(data, found))


def _sizes(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """Return the bytes of a fat binary's header, and of its entries."""
    header, size = struct.unpack_from("<HQ", data[at + 6 : at + 16])
    return header, size


def _entries(data: bytes | bytearray, at: int) -> Iterator[_Entry]:
    header, size = _sizes(data, at)
    at += header
    end = at + size
    while at < end:
        kind, _, header, payload = struct.unpack_from("<HHIQ", data, at)
        (architecture,) = struct.unpack_from("<I", data, at + 28)
        yield _Entry(kind, architecture, bytes(data[at : at + header + payload]))
        at += header + payload


def _elf_sections(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, offset and bytes of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    each, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * each) for i in range(count)]
    for name, _, _, _, offset, size in headers:
        start = headers[names][4] + name
        yield data[start : data.index(b"\0", start)], offset, size
