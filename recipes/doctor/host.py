"""Check installed versions, memory of GPU and node, and the disk."""

import os
import platform
import shutil
import time
from collections.abc import Iterator
from uuid import uuid4

import psutil
import torch

from ...engine.compat.versions import faults, installed, tested, untested
from ...engine.errors import listed
from ...engine.moe.gemm.backends import choose_backend
from .check import NEEDS_A_GPU, Ranks, Row, rate_row, verdict_of

__all__ = ["judge_disk", "judge_memory", "judge_versions", "measure_disk", "measure_memory", "measure_versions"]

_PACKAGES = ("torch", "transformers", "triton", "verl", "ray", "vllm", "sglang")
_GIB = 1 << 30
_FREE = 0.9  # of a GPU's memory
_PINNED = 10.0  # GB/s between pinned memory and a GPU: half of PCIe 4.0's rate
_DISK = 0.5  # GB/s per node
_CHECKPOINT = 366  # GB: Qwen3-30B-A3B with AdamW's states, float32


def measure_versions(ranks: Ranks) -> dict[str, str]:
    found = {"python": platform.python_version()}
    found |= {name: version for name in _PACKAGES if (version := installed(name))}
    if ranks.device == "cuda":
        found |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        found["gpu"] = torch.cuda.get_device_name()
    dtype = torch.bfloat16 if ranks.device == "cuda" else torch.float32
    return found | {"kernels": choose_backend("auto", ranks.device, dtype).name}


def judge_versions(found: list[dict[str, str]], ranks: Ranks) -> Iterator[Row]:
    first = found[0]
    gpu = f"{first.get('gpu', 'no GPU')}{', which ranks of a node share' if ranks.shares_gpu else ''}"
    value = f"{ranks.nodes} x {ranks.per_node}, {gpu}; experts computed by {first['kernels']}"
    yield Row("ranks", value, cluster={"nodes": ranks.nodes, "gpus": ranks.per_node})
    packages = [name for name in _PACKAGES if name in first]
    wrong = [f"{name}: {rule} What works: '{works}'" for name, rule, works in faults({n: first[n] for n in packages})]
    for rank, each in enumerate(found[1:], 1):
        differ = sorted(name for name in first | each if first.get(name) != each.get(name))
        wrong += [f"rank {rank} has {name} {each.get(name)}" for name in differ]
    value = ", ".join(f"{name} {version}" for name, version in first.items() if name not in ("gpu", "kernels"))
    yield Row("versions", listed([value, *wrong]), "equal, accepted", "wrong" if wrong else "right")
    if new := [f"{name} {first[name]}" for name in packages if tested(name) and untested(name)]:
        yield Row("versions never tested with", ", ".join(new))


def measure_memory(ranks: Ranks) -> dict[str, float]:
    """Return GiB of host and GPU memory, and GB/s between GPU and pinned memory; all ranks copy at once."""
    found = {"host": psutil.virtual_memory().available / _GIB, "shared": shutil.disk_usage("/dev/shm").free / _GIB}
    if ranks.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {"free": free / _GIB, "total": total / _GIB}
    if ranks.has_gpus:
        pinned = torch.empty(_GIB, dtype=torch.uint8, pin_memory=True)
        on_gpu = torch.empty_like(pinned, device="cuda")
        found["up"] = _GIB / ranks.seconds_of(lambda: on_gpu.copy_(pinned, non_blocking=True)) / 1e9
        found["down"] = _GIB / ranks.seconds_of(lambda: pinned.copy_(on_gpu, non_blocking=True)) / 1e9
    return found


def judge_memory(found: list[dict[str, float]], ranks: Ranks) -> Iterator[Row]:
    host, shared = (min(each[name] for each in found) for name in ("host", "shared"))
    yield Row("memory of a node, free", f"{host:.0f} GiB, and {shared:.0f} in /dev/shm")
    if "free" not in found[0]:
        yield Row("memory of a GPU, pinned memory", NEEDS_A_GPU)
        return
    rank = min(range(len(found)), key=lambda rank: found[rank]["free"] / found[rank]["total"])
    free, total = found[rank]["free"], found[rank]["total"]
    value, verdict = f"{free:.1f} of {total:.1f} GiB on rank {rank}", verdict_of(free / total, _FREE)
    cluster = {"gib": round(min(each["total"] for each in found), 1)}
    yield Row("memory of a GPU, free", value, f">= {_FREE:.0%}", verdict, cluster=cluster)
    for name, direction in (("up", "to"), ("down", "from")) if ranks.has_gpus else ():
        yield rate_row(f"pinned memory {direction} a GPU", [each[name] for each in found], "GB/s", _PINNED)


def measure_disk(ranks: Ranks) -> dict[str, float]:
    """Return GB/s of writing a file (with fsync) and of reading it back, on one rank of each node."""
    if ranks.rank % ranks.per_node:
        return {}
    nbytes = _GIB if ranks.has_gpus else 1 << 25
    path, data = ranks.folder / f".doctor-{uuid4().hex}", os.urandom(1 << 24)
    try:
        with path.open("wb", buffering=0) as file:
            began = time.perf_counter()
            for _ in range(nbytes // len(data)):
                file.write(data)
            os.fsync(file.fileno())
            written = time.perf_counter() - began
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # or the page cache serves the read
            began = time.perf_counter()
            while file.read(len(data)):
                pass
            read = time.perf_counter() - began
    finally:
        path.unlink(missing_ok=True)
    return {"write": nbytes / written / 1e9, "read": nbytes / read / 1e9}


def judge_disk(found: list[dict[str, float]], ranks: Ranks) -> Iterator[Row]:
    nodes = [each for each in found if each]
    write, read = (min(each[name] for each in nodes) for name in ("write", "read"))
    minutes = _CHECKPOINT / (write * len(nodes)) / 60
    value = f"{write:.2g} GB/s written, {read:.2g} read: {minutes:.1f} min to save Qwen3-30B-A3B and AdamW's states"
    wanted = _DISK if ranks.has_gpus else None
    yield Row("disk of a node", value, f">= {wanted}" if wanted else "", verdict_of(min(write, read), wanted))
