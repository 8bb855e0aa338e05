"""Packages for a machine with a GPU: code of other GPUs is blanked, and folders may arrive one after another."""

import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.gpu import gpu_site
from benchmarks.gpu.fat_binaries import blank_other_code

ROOT = Path(__file__).parents[3]
PTX, CUBIN = 1, 2


def _entry(kind: int, architecture: int, payload: bytes) -> bytes:
    header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(payload), 0, 0, 0, 0, architecture)
    return header.ljust(64, b"\0") + payload


def _fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def _library(path: Path, content: bytes) -> int:
    """Write an ELF file with one section of fat binaries; returns where that begins."""
    names, start = b"\0.nv_fatbin\0.names\0", 64
    sections = [(0, 0, 0), (1, start, len(content)), (12, start + len(content), len(names))]
    table = start + len(content) + len(names)
    header = struct.pack("<40xQ10xHHH", table, 64, len(sections), 2).ljust(64, b"\0")
    rows = [struct.pack("<IIQQQQ", name, 0, 0, 0, at, size).ljust(64, b"\0") for name, at, size in sections]
    path.write_bytes(header + content + names + b"".join(rows))
    return start


def test_library_keeps_the_cubins_of_one_gpu_and_its_size(tmp_path):
    path, own, other, small = tmp_path / "lib.so", b"own" * 40, b"other" * 100, b"small"
    binaries = [
        _fat_binary(_entry(CUBIN, 80, other), _entry(CUBIN, 90, own), _entry(PTX, 90, b"ptx")),
        _fat_binary(_entry(CUBIN, 80, other), _entry(PTX, 80, b"ptx")),  # the driver compiles its PTX
        _fat_binary(_entry(CUBIN, 90, b"unwanted" * 20), _entry(CUBIN, 100, small)),
    ]
    start = _library(path, b"".join(binaries))
    before = path.read_bytes()
    kept = [_entry(CUBIN, 90, own), _entry(PTX, 80, b"ptx"), _entry(CUBIN, 100, small)]
    assert blank_other_code(path, 90, lambda cubin: b"unwanted" not in cubin) == sum(map(len, kept))
    expected = bytearray(before)
    for binary, body in zip(binaries, kept, strict=True):
        now = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
        expected[start : start + len(binary)] = now.ljust(len(binary), b"\0")
        start += len(binary)
    assert path.read_bytes() == bytes(expected)


def test_site_is_packed_by_package_and_unpacked_in_two_calls(tmp_path):
    site, tree = tmp_path / "site", tmp_path / "tree"
    for name in ("vllm", "vllm-0.24.0.dist-info", "ray", "transformers", "verl"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(f"NAME = '{name}'\n")
    sizes = gpu_site.pack(site, tree / ".gpu_run")
    assert sizes.keys() == {"a", "b"} and all(sizes.values())
    with tarfile.open(tree / ".gpu_run/b/vllm.tar.xz") as tar:
        assert {name.partition("/")[0] for name in tar.getnames()} == {"vllm", "vllm-0.24.0.dist-info"}
    for folder in (".ci", "benchmarks/gpu", "engine"):
        (tree / folder).mkdir(parents=True)
    for script in ("gpu_run", "link"):
        shutil.copy(ROOT / ".ci" / script, tree / ".ci")
    (tree / "engine/code.py").write_text("VALUE = 1\n")
    (tree / "benchmarks/gpu/gpu_run.py").write_text(
        "import sys, ray, transformers, verl, vllm\nfrom epfsdp2.engine import code\n"
        "print(code.VALUE, vllm.NAME, *sys.argv[1:])\n"
    )
    environment = os.environ | {"PYTHON": sys.executable, "GPU_SITE": str(tmp_path / "unpacked")}
    (tree / ".gpu_run/b").rename(tmp_path / "b")

    def call() -> str:
        command = ["bash", tree / ".ci/gpu_run", "A"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert call() == "epfsdp2: ray.tar.xz is still to come\n"
    shutil.rmtree(tree / ".gpu_run/a")  # each folder is carried once
    (tmp_path / "b").rename(tree / ".gpu_run/b")
    assert call() == "1 vllm A\n"
    shutil.rmtree(tree / ".gpu_run")
    (tree / "engine/code.py").write_text("VALUE = 20\n")
    assert call() == "20 vllm A\n"
