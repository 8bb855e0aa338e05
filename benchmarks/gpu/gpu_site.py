"""Collect the packages of ``make gpu-run`` for a machine with an H100, torch 2.11 and no network, in two folders.

    python -m benchmarks.gpu.gpu_site [--out .gpu_run] [--work FOLDER]

vLLM's wheel for CUDA 13, verl, Ray, transformers 5.9 and their imports (``.ci/gpu_site.txt``), for Python 3.12 on
Linux, have 460 MB. Without files that no run reads, and with code of other GPUs blanked, the folders ``a`` and ``b``
have about 80 MB. There vLLM keeps FlashAttention 3 in bfloat16 with heads of 128, and no quantised kernels.
``.ci/gpu_run`` links the project's own code. Takes ten minutes on two cores, and 2 GB in ``--work``.
"""

import argparse
import fnmatch
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from benchmarks.gpu.fat_binaries import blank_other_code
from benchmarks.tables import ROOT

PYTHON, ARCHITECTURE = "3.12", 90
MOST_MEGABYTES = 56  # of a folder, so that it goes beside the tree
_GLIBC = (*range(39, 16, -1), 12, 5)
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + [
    f"manylinux{year}_x86_64" for year in (2014, 2010, 1)
]
_LEFT_OUT = (ROOT / ".ci/gpu_site_left_out.txt").read_text().split()
_KERNELS = "vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"
_FLASH_ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
_STRIPPED = "libxgrammar_bindings.so", "raylet", "gcs_server"
FOLDERS = {"a": ("transformers", "*"), "b": ("ray", "vllm")}  # and the archives of each; "*" has the rest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu_run", help="where the folders a and b come")
    parser.add_argument("--work", type=Path, help="keeps downloads and files there; by default a temporary folder")
    asked = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = asked.work or Path(temporary)
        console.print("downloading and installing")
        site = install(work)
        console.print("trimming")
        trim(site)
        console.print("packing")
        for folder, size in pack(site, asked.out).items():
            console.print(f"{folder}: {size / 1e6:.1f} MB")
            if size > MOST_MEGABYTES << 20:
                console.print(f"{folder} is above {MOST_MEGABYTES} MiB", style="red")
                return 1
    return 0


def install(work: Path) -> Path:
    """Download the wheels and install all of them into one folder, which it returns.

    One call installs all: of two that bring parts of a namespace package the second would overwrite the first.
    """
    wheels, site = work / "wheels", work / "site"
    target = [word for name in _PLATFORMS for word in ("--platform", name)]
    target += ["--python-version", PYTHON, "--implementation", "cp", "--only-binary=:all:"]
    _pip("download", "--no-deps", *target, "-d", wheels, "-r", ROOT / ".ci/gpu_site.txt")
    _pip("wheel", "--no-deps", "-w", wheels, "antlr4-python3-runtime==4.9.3")  # has no wheel
    _pip("wheel", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT)
    shutil.rmtree(site, ignore_errors=True)
    _pip("install", "--no-index", "--no-deps", "--no-compile", *target, "--target", site, *wheels.glob("*.whl"))
    shutil.rmtree(site / "epfsdp2")  # its entry points stay, in its metadata
    return site


def _pip(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *map(str, words)], check=True)


def trim(site: Path) -> None:
    """Delete files that a run does not read, symbols, and code of other GPUs."""
    for path in [path for path in site.rglob("*") if path.is_file()]:
        name = str(path.relative_to(site))
        if any(fnmatch.fnmatch(name, pattern) for pattern in _LEFT_OUT):
            path.unlink()
        elif name in (*_KERNELS, _FLASH_ATTENTION):
            subprocess.run(["strip", "--strip-all", path], check=True)
            blank_other_code(
                path, ARCHITECTURE, _is_wanted_attention if name == _FLASH_ATTENTION else lambda cubin: True
            )
        elif path.name in _STRIPPED:
            subprocess.run(["strip", "--strip-all", path], check=True)
        elif ".so" in path.suffixes:
            # Debug information alone, and where it fails nothing: some vendored libraries do not survive it.
            subprocess.run(["strip", "--strip-debug", path], check=False, stderr=subprocess.DEVNULL)


def _is_wanted_attention(cubin: bytes) -> bool:
    """Whether a cubin of FlashAttention 3 has no attention forward, or the one of bfloat16 with heads of 128."""
    names = [name for name in re.findall(rb"\.text\.(_Z\w+)", cubin) if b"CollectiveMainloopFwd" in name]
    return not names or any(b"ELi128ENS_10bfloat16_t" in name for name in names)


def pack(site: Path, out: Path) -> dict[str, int]:
    """Write archives that are unpacked apart; returns the bytes of each folder."""
    named = [name for names in FOLDERS.values() for name in names if name != "*"]

    def archive_of(top: str) -> str:
        return next((name for name in named if top == name or top.startswith(f"{name}-")), "*")

    def write(folder: str, name: str) -> int:
        path = out / folder / f"{name.replace('*', 'rest')}.tar.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A dictionary of 64 MiB finds in one library what another has, too.
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
        with lzma.open(path, "wb", filters=filters) as file, tarfile.open(fileobj=file, mode="w") as tar:
            for top in sorted(site.iterdir()):
                if archive_of(top.name) == name:
                    tar.add(top, top.name)
        return path.stat().st_size

    shutil.rmtree(out, ignore_errors=True)
    wanted = [(folder, name) for folder, names in FOLDERS.items() for name in names]
    with ThreadPoolExecutor(2) as pool:  # lzma releases the interpreter's lock; 700 MB each
        sizes = list(pool.map(lambda each: write(*each), wanted))
    return {folder: sum(s for (f, _), s in zip(wanted, sizes, strict=True) if f == folder) for folder in FOLDERS}


if __name__ == "__main__":
    sys.exit(main())
