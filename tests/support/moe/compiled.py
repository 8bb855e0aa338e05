"""Triton kernels compiled ahead of time for GPUs that are not there, and budgets of registers, stack and shared memory.

``python -m tests.support.moe.compiled experts ARCH DTYPE`` prints a row per launch as JSON; ``fp8`` and ``few`` take no
arguments, ``head``, ``norms`` and ``rotary`` one architecture or all.
Launches have meta tensors of a model's sizes, and compile their kernel for an architecture instead of running it.
"""

import contextlib
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from epfsdp2.engine.dense import triton_norms, triton_rotary
from epfsdp2.engine.dense.rotary import Rotation
from epfsdp2.engine.head import triton_tiles as triton_head
from epfsdp2.engine.head.log_probs import tile_sizes
from epfsdp2.engine.moe.collectives.rows import AllToAll
from epfsdp2.engine.moe.dispatch import DispatchPlan
from epfsdp2.engine.moe.fused import Experts, on_rows, on_tokens
from epfsdp2.engine.moe.gemm import triton_backend
from epfsdp2.engine.moe.gemm.gate import Gate
from epfsdp2.engine.moe.gemm.linear import Linear
from epfsdp2.engine.quantise import triton_blocks
from epfsdp2.engine.quantise.blocks import FP8
from epfsdp2.rollout.layout.rollout_config import BLOCK

SMS = {80: 108, 90: 132, 100: 148}  # by architecture: A100, H100, B200
GEMMS = ("grouped_mm", "grouped_mm_gate", "grouped_mm_gate_backward", "grouped_outer")
_TOKENS = 16384
_SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}  # bytes of an SM; the system takes 1 KiB of each CTA
_REGISTERS, _THREADS, _CTAS = 65536, 2048, 32  # of an SM
_EPILOGUE_STACK = 64  # bytes that a thread may spill where a tile is finished
_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_PRODUCTS = (re.compile(r"\b(HMMA|HGMMA|UTC\w*MMA)\b"), re.compile(r"\bFFMA\b"))  # in half precision, in float32
_STACK = re.compile(r"\b(STL|LDL)\b")
_MMA = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
_INSTRUCTIONS = (*_MMA.values(), "cp.async.cg", "cp.async.bulk.tensor", "setmaxnreg")
_OPTIONAL = ("index", "a_index", "b_index", "order")  # operands that may be None


def _row(kernel: str, arch: int, dtype: str, found: dict[str, Any], values: dict[str, Any], is_first: bool) -> dict:
    """Return a launch as a row; its problems are the budgets that it is over.

    Args:
        found: ``_resources`` of the compiled kernel.
        values: arguments that are numbers, and whether optional operands are there.
        is_first: whether this tile runs where none is measured.
    """
    is_persistent, problems = "SPECIALIZED" in values, []
    registers = _REGISTERS // (-(-found["registers"] // 8) * 8 * 32 * found["warps"])
    ctas = min(registers, _SHARED[arch] // (found["shared"] + 1024), _THREADS // (32 * found["warps"]), _CTAS)
    if found["stack"] > _EPILOGUE_STACK or found["spills_in_loop"]:
        problems.append(f"{found['stack']} bytes of stack{', used in its loop' if found['spills_in_loop'] else ''}")
    least_ctas = 4
    if kernel in GEMMS:
        # Rows of an adapter of rank 8 are no multiple of 32 bytes, and load no 16 bytes.
        is_aligned = all(values.get(name, 16) % 16 == 0 for name in ("K", "M", "N"))
        least_ctas = 2 if is_first and is_aligned else 1  # one computes, another loads or stores
        wanted = {
            _MMA[arch]: dtype != "float32",
            "cp.async.cg": is_aligned and not is_persistent,
            "cp.async.bulk.tensor": is_persistent,  # TMA
            "setmaxnreg": values.get("SPECIALIZED", False),
        }
        missing = {name for name, is_wanted in wanted.items() if is_wanted} - set(found["instructions"])
        problems += [f"no {name}" for name in missing]
    if ctas < least_ctas:
        problems.append(f"{ctas} CTAs by {found['registers']} registers, {found['shared']} bytes, not {least_ctas}")
    tile = [values.get(size, 0) for size in ("BM", "BN", "BK")]
    row = {"kernel": kernel, "arch": arch, "dtype": dtype, "ctas": ctas, "is_persistent": is_persistent, **found}
    row |= {"is_indexed": any(values.get(name) for name in ("index", "a_index", "b_index"))}
    row |= {"is_scattered": values.get("order", False)}
    return row | {"problems": [f"{kernel}, sm_{arch}, {dtype}, {tile}: {text}" for text in problems]}


class _Driver:
    """The driver of a GPU; its device's number is the architecture, because Triton caches by it."""

    def __init__(self, arch: int):
        self._arch = arch

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)


@contextlib.contextmanager
def on_gpu(arch: int, launches: list[dict], every_tile: bool = True) -> Iterator[None]:
    """Compile launches for ``arch`` and append their rows; none runs.

    Args:
        every_tile: compile a GEMM with each tile of its list, otherwise with the first.
    """
    run, is_first = JITFunction.run, True

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        # A descriptor has its tensor as ``base``.
        values = dict(zip(kernel.arg_names, (getattr(arg, "base", arg) for arg in args), strict=False)) | kwargs
        tensor = next(value for value in values.values() if isinstance(value, torch.Tensor))
        numbers = {name: value for name, value in values.items() if isinstance(value, int)}
        numbers |= {name: values.get(name) is not None for name in _OPTIONAL}
        dtype = str(tensor.dtype).removeprefix("torch.")
        launches.append(_row(kernel.__name__, arch, dtype, _resources(compiled), numbers, is_first))

    def launch_each(what, key, tiles, groups, launch, results=()):
        nonlocal is_first
        for i, tile in enumerate(tiles):
            is_first = i == 0
            if is_first or every_tile:
                launch(tile)
        is_first = True

    properties = SimpleNamespace(multi_processor_count=SMS[arch])
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(triton_backend, "launch_fastest", launch_each),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(arch, 10)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        mock.patch.object(triton.runtime.driver, "_active", _Driver(arch)),
    ):
        yield


_read: dict[str, dict[str, Any]] = {}


def _resources(compiled: Any) -> dict[str, Any]:
    """Return registers and bytes of stack of a thread, and whether products are between uses of the stack."""
    if compiled.hash not in _read:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(compiled.asm["cubin"])
            usage = _output(_BIN / "cuobjdump", "--dump-resource-usage", file.name)
            registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
            in_loop = bool(stack) and _spills_in_loop(_output(_BIN / "nvdisasm", "-c", file.name).splitlines())
        meta, instructions = compiled.metadata, [name for name in _INSTRUCTIONS if name in compiled.asm["ptx"]]
        row = {"warps": meta.num_warps, "registers": registers, "stack": stack, "spills_in_loop": in_loop}
        _read[compiled.hash] = row | {"shared": meta.shared, "instructions": instructions}
    return _read[compiled.hash]


def _output(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _spills_in_loop(sass: list[str]) -> bool:
    """Whether machine code, by lines, uses the stack between its first product and its last."""
    for product in _PRODUCTS:
        lines = [number for number, line in enumerate(sass) if product.search(line)]
        if lines:
            return any(_STACK.search(line) for line in sass[lines[0] : lines[-1]])
    return True


# -- the experts' GEMMs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """The experts of a model on one rank, with a low-rank adapter where ``lora`` is its rank."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    is_interleaved: bool = False
    is_transposed: bool = False
    has_bias: bool = False
    lora: int = 0
    has_gate = True  # the backends read this and ``_apply_gate`` of an experts module

    @property
    def _apply_gate(self) -> Gate:
        return Gate(self.alpha, self.beta, self.limit, self.is_interleaved)


QWEN3_30B, GPT_OSS = Model(128, 8, 2048, 768), Model(128, 4, 2880, 2880, 1.702, 1.0, 7.0, True, True, True)
MODELS = (
    *(QWEN3_30B, GPT_OSS),
    Model(128, 8, 4096, 1536),  # Qwen3-235B-A22B
    Model(256, 8, 7168, 2048),  # DeepSeek-V3
    Model(160, 8, 5120, 1536),  # GLM-4.5
    Model(128, 8, 4096, 1408),  # GLM-4.5-Air
    *(Model(128, 8, 2048, 768, lora=rank) for rank in (8, 32, 64)),
)


def compile_model(model: Model, arch: int, dtype: str, only_forward: bool = False) -> list[dict]:
    """Compile the experts' forward and backward, all weights trained: of tokens, and of rows that were received.

    Args:
        only_forward: compile the forward of tokens, with the first tile of each GEMM.
    """
    kwargs: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": "meta"}
    e, h, i, r = model.experts, model.hidden, model.inner, model.lora

    def linear(out: int, into: int) -> Linear:
        shape = (e, into, out) if model.is_transposed else (e, out, into)
        parts = [torch.empty(shape, **kwargs, requires_grad=not r)]
        parts.append(torch.empty(e, out, **kwargs, requires_grad=True) if model.has_bias else None)
        low = [torch.empty(shape, **kwargs, requires_grad=True) for shape in ((e, r, into), (e, out, r)) if r]
        return Linear(*parts, *(low or [None, None]), scaling=2.0, is_transposed=model.is_transposed)

    slots = torch.empty(_TOKENS * model.top_k, dtype=torch.int64, device="meta")
    counts = torch.empty(e, dtype=torch.int64, device="meta")
    weights = torch.empty(_TOKENS, model.top_k, dtype=torch.float32, device="meta", requires_grad=True)
    tokens = torch.empty(_TOKENS, h, **kwargs, requires_grad=True)
    rows = torch.empty(len(slots), h, **kwargs, requires_grad=True)
    operators = triton_backend.TritonBackend()
    local = Experts(model, operators, linear(2 * i, h), linear(h, i))
    plan, launches = DispatchPlan(counts, slots, None, AllToAll([], [], None)), []
    with on_gpu(arch, launches, not only_forward):
        out = on_tokens(local, tokens, weights, plan, kwargs["dtype"], [])
        forward = len(launches)
        if not only_forward:
            out.sum().backward()
            operators.take(tokens.detach(), slots)  # as tokens are sent
        if not only_forward and model in (QWEN3_30B, GPT_OSS):
            on_rows(local, rows, counts, weights.view(-1)).sum().backward()
            on_rows(local, rows, counts, weights.view(-1), slots).sum().backward()
    return [launch | {"is_forward": number < forward} for number, launch in enumerate(launches)]


def experts(arch: str, dtype: str) -> Iterator[dict]:
    """Compile the experts of all models for a GPU in a dtype, with every tile."""
    for model in MODELS:
        yield from compile_model(model, int(arch), dtype)


def few() -> Iterator[dict]:
    """Compile the forward of Qwen3-30B-A3B's experts in bfloat16 for an H100."""
    yield from compile_model(QWEN3_30B, 90, "bfloat16", only_forward=True)


# -- kernels that pass over values and multiply no matrices -----------------------------------------------------------


def fp8() -> Iterator[dict]:
    """Compile the kernels of FP8 for experts of Qwen3-30B-A3B, stored in float32 and in bfloat16."""
    for arch, dtype in itertools.product((90, 100), (torch.float32, torch.bfloat16)):
        launches: list[dict] = []
        weight = torch.empty(16, 1536, 2048, dtype=dtype, device="meta")
        with on_gpu(arch, launches):
            maxima = triton_blocks.block_maxima(weight, (0, 0), BLOCK)
            triton_blocks.quantise(weight, maxima, (0, 0), BLOCK, weight.to(FP8))
            triton_blocks.round_in_place(weight, BLOCK)
        yield from launches


def head(*only: str) -> Iterator[dict]:
    """Compile the kernels of a tile of logits in every dtype, with entropies and without."""
    for arch, dtype in itertools.product(map(int, only or SMS), (torch.bfloat16, torch.float16, torch.float32)):
        launches: list[dict] = []
        logits = torch.empty(tile_sizes("cuda"), dtype=dtype, device="meta")
        of_rows = torch.empty(len(logits), device="meta")
        labels, sums = of_rows.long(), torch.empty(4, len(logits), device="meta")
        with on_gpu(arch, launches):
            for entropy in (None, of_rows):
                triton_head.reduce_tile(logits, of_rows, labels, sums, entropy is not None)
                triton_head.gradient_of(logits, of_rows, labels, of_rows, of_rows, entropy, of_rows)
        yield from launches


def norms(*only: str) -> Iterator[dict]:
    """Compile the kernels of RMSNorms over a head of 128 columns, and over the widest hidden states."""
    arches, dtypes = map(int, only or SMS), (torch.bfloat16, torch.float32)
    for arch, dtype, width in itertools.product(arches, dtypes, (128, 2048, 7168)):
        launches: list[dict] = []
        x, weight = torch.empty(8192, width, dtype=dtype, device="meta"), torch.empty(width, dtype=dtype)
        with on_gpu(arch, launches):
            _, scale = triton_norms.forward(x, weight, 1e-6, 0.0, True)
            triton_norms.backward(x, x, weight, scale, 0.0, True)
        yield from launches


def rotary(*only: str) -> Iterator[dict]:
    """Compile the kernel of rotary embeddings, of whole heads and of a part of each, forward and backward."""
    others = Rotation(True, True, "neighbours", rounds_last=True, is_last=True)
    arches, rotations = map(int, only or SMS), (Rotation(), others)
    for arch, part, is_backward, rotation in itertools.product(arches, (128, 64), (False, True), rotations):
        launches: list[dict] = []
        x = torch.empty(2, 32, 2048, 128, dtype=torch.bfloat16, device="meta")
        cos = torch.empty(1, 2048, part, dtype=torch.bfloat16, device="meta")
        with on_gpu(arch, launches):
            triton_rotary.rotate(x, cos, cos, rotation, is_backward)
        yield from launches


if __name__ == "__main__":
    print(json.dumps([*globals()[sys.argv[1]](*sys.argv[2:])]))
