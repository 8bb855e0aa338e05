"""Compile what the Triton backend launches, for GPUs that need not be there.

The experts' forward and backward run on meta tensors of a model's sizes with the backend of a GPU user. Each launch of
a kernel compiles it for an architecture, as Triton would on that GPU, instead of running it; what the compiler says of
it is kept.
"""

import os

# Read when Triton decides about ``triton.jit``: interpreted kernels can't be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import contextlib
import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

__all__ = ["ARCHITECTURES", "Compiled", "Launch", "on_gpu"]

ARCHITECTURES = (80, 90, 100)
_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# What the PTX of a kernel has, and what the machine code.
_IN_PTX = {
    "mma.sync": r"\bmma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]\.",
    "tma": r"cp\.async\.bulk\.tensor",
}
_IN_SASS = {"stores to stack": r"\bSTL\b", "loads from stack": r"\bLDL\b"}
_SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}  # of an SM, of which 1 KiB a CTA is the system's
_REGISTERS, _THREADS, _CTAS = 65536, 2048, 32  # of an SM


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs of an SM of ``arch``; ``counts`` are of instructions by name."""

    kernel: str
    arch: int
    warps: int
    stages: int
    registers: int
    stack: int
    shared: int
    counts: dict[str, int] = field(hash=False)

    @property
    def ctas(self) -> int:
        """How many run on an SM at a time."""
        by_registers = _REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.warps)
        by_shared = _SHARED[self.arch] // (self.shared + 1024)
        return min(by_registers, by_shared, _THREADS // (32 * self.warps), _CTAS)


@dataclass(frozen=True)
class Launch:
    """A launch: what it compiled to, its grid, and its arguments that are numbers."""

    compiled: Compiled
    grid: tuple[int, ...]
    dtype: str
    values: dict[str, Any] = field(hash=False)


class _Driver:
    """Stands in for the driver of a GPU of each architecture; a device's number is its architecture."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@contextlib.contextmanager
def on_gpu(arch: int, launches: list[Launch]) -> Iterator[None]:
    """Make it look as if there were a GPU of ``arch``; launches compile, with each tile of a list, and are appended."""

    run = JITFunction.run

    def compile_instead(kernel, *args, grid, warmup, **kwargs):
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
        numbers = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        launches.append(Launch(_described(kernel.__name__, arch, compiled), grid, dtype, numbers))

    def launch_all(what, key, tiles, launch):
        for tile in tiles:
            launch(tile)

    capability = (arch // 10, arch % 10)
    with contextlib.ExitStack() as stack:
        patch = functools.partial(mock.patch.object, spec=False)
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_instead))
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability))
        from epfsdp2.engine.moe.gemm import triton_backend

        stack.enter_context(mock.patch.object(triton_backend, "launch_fastest", launch_all))
        triton.runtime.driver.set_active(_Driver(arch))
        stack.callback(setattr, triton.runtime.driver, "_active", None)
        yield


_seen: dict[str, Compiled] = {}


def _described(name: str, arch: int, compiled: Any) -> Compiled:
    key = compiled.hash
    if key not in _seen:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(compiled.asm["cubin"])
            usage, sass = (
                subprocess.run([_BIN / tool, *options, file.name], capture_output=True, text=True, check=True).stdout
                for tool, options in (("cuobjdump", ["--dump-resource-usage"]), ("nvdisasm", ["-c"]))
            )
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found is not None, usage
        counts = {label: len(re.findall(pattern, compiled.asm["ptx"])) for label, pattern in _IN_PTX.items()}
        counts |= {label: len(re.findall(pattern, sass)) for label, pattern in _IN_SASS.items()}
        meta = compiled.metadata
        _seen[key] = Compiled(
            name, arch, meta.num_warps, meta.num_stages, int(found[1]), int(found[2]), meta.shared, counts
        )
    return _seen[key]
