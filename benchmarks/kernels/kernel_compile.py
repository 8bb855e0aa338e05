"""Compile what the Triton backends launch, for a GPU that need not be there, and read what the compiler made of it.

The experts' forward and backward run on meta tensors of a model's sizes with the backend of a GPU user. Each launch of
a kernel compiles it for an architecture, as Triton would on that GPU, instead of running it.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.kernels.kernel_model import GPUS, Compiled, Launch, spills_in_loop
from epfsdp2.engine.moe.gemm import triton_backend, triton_tiles

__all__ = ["not_compiled", "on_gpu"]

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]\.",
    "TMA": r"cp\.async\.bulk\.tensor",
    "specialized warps": r"setmaxnreg",
}


class _Driver:
    """Stands in for the driver of a GPU; its device's number is the architecture, by which Triton caches."""

    def __init__(self, arch: int):
        self._arch = arch

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)


@contextlib.contextmanager
def on_gpu(arch: int, launches: list[Launch], every_tile: bool = True) -> Iterator[None]:
    """Make it look as if there were a GPU of ``arch``: launches are compiled and appended, none runs.

    Args:
        every_tile: compile a GEMM with each tile of its list; else with the first of each kernel.

    Raises:
        RuntimeError: Triton interprets its kernels in this process.
    """
    if triton_tiles.INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1: interpreted kernels can't be compiled; unset it")
    run, is_first = JITFunction.run, True

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        if compiled is None:  # noted by ``not_compiled``
            return
        # A descriptor stands for its tensor.
        values = dict(zip(kernel.arg_names, (getattr(arg, "base", arg) for arg in args), strict=False)) | kwargs
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        numbers = {name: value for name, value in values.items() if name not in tensors}
        once = {id(tensor): name for name, tensor in reversed(tensors.items())}.values()  # some stand for none
        nbytes = {name: tensors[name].nbytes for name in once}
        programs = 1
        for axis in grid:
            programs *= axis
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        launches.append(Launch(_read(kernel.__name__, arch, compiled), programs, dtype, numbers, nbytes, is_first))

    def launch_each(what, key, tiles, groups, launch, results=()):
        nonlocal is_first
        for i, tile in enumerate(tiles):
            is_first = i == 0
            if is_first or every_tile or isinstance(tiles[i - 1], str) or tile.is_persistent:
                launch(tile)
        is_first = True

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        stack.enter_context(mock.patch.object(triton_backend, "launch_fastest", launch_each))
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(arch, 10)))
        properties = SimpleNamespace(multi_processor_count=GPUS[arch].sms)
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _Driver(arch)))
        yield


@contextlib.contextmanager
def not_compiled(names: list[str]) -> Iterator[None]:
    """Compile nothing inside of ``on_gpu``; append the name of each kernel that this process has no such code of."""

    def note(*, fn: Any, **_: Any) -> bool:
        names.append(fn.name.rpartition(".")[2])
        return True  # Triton leaves it out

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = note
        yield


_seen: dict[str, Compiled] = {}


def _read(name: str, arch: int, compiled: Any) -> Compiled:
    if compiled.hash not in _seen:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(compiled.asm["cubin"])
            usage = _said(_BIN / "cuobjdump", "--dump-resource-usage", file.name)
            found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
            assert found is not None, usage
            registers, stack = map(int, found.groups())
            in_loop = bool(stack) and spills_in_loop(_said(_BIN / "nvdisasm", "-c", file.name).splitlines())
        ptx, meta = compiled.asm["ptx"], compiled.metadata
        counts = {label: len(re.findall(pattern, ptx)) for label, pattern in _INSTRUCTIONS.items()}
        _seen[compiled.hash] = Compiled(
            name, arch, meta.num_warps, meta.num_stages, registers, stack, in_loop, meta.shared, counts
        )
    return _seen[compiled.hash]


def _said(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
