"""The section of ``gpu_check.py`` on experts' GEMMs beside a collective: what its SMs cost, and SMs left to it."""

import statistics
from collections.abc import Iterator
from unittest import mock

import torch

from benchmarks.gpu.gpu_rows import HAS_GPU, NEEDS_A_GPU, Row
from epfsdp2.engine.compat.torch_sms import leave_sms
from epfsdp2.engine.moe.gemm.backends import Groups

__all__ = ["contention"]

EXPERTS, WIDTH, OUTPUTS, ROWS = 16, 2048, 768, 65536
HELD = (0, 16, 24)  # SMs: NCCL's within a node of H100s, and what it may take at most by default
_SETTLE = 200_000  # cycles until the holding kernel has its SMs
_GEMMS, _REPEATS, _COPIES = 4, 7, 40


def contention() -> Iterator[Row]:
    """A GEMM of the experts beside a kernel that holds SMs as NCCL's do, with as many left to it or none."""
    if not HAS_GPU:
        yield Row("SMs that a collective holds", NEEDS_A_GPU)
        return
    import triton
    import triton.language as tl

    from epfsdp2.engine.moe.gemm import triton_backend
    from epfsdp2.engine.moe.gemm.triton_tiles import Tile

    @triton.jit
    def hold(x, y, n, times, BLOCK: tl.constexpr):
        for _ in range(times):
            for at in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
                i = at + tl.arange(0, BLOCK)
                tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)

    rows = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(EXPERTS, OUTPUTS, WIDTH, device="cuda", dtype=torch.bfloat16).mT
    counts = torch.full((EXPERTS,), ROWS // EXPERTS, device="cuda")
    x = torch.randn(1 << 24, device="cuda")
    y, backend, beside = torch.empty_like(x), triton_backend.TritonBackend(), torch.cuda.Stream()

    def milliseconds(held: int) -> float:
        torch.cuda.synchronize()
        if held:
            with torch.cuda.stream(beside):  # 512 threads: no SM has room for them and a GEMM's program
                hold[(held,)](x, y, x.numel(), _COPIES, BLOCK=4096, num_warps=16)
            torch.cuda._sleep(_SETTLE)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_GEMMS):
            backend.mm(rows, weight, Groups(counts, ROWS))
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / _GEMMS

    tiles = {
        "128 x 128, two on an SM": Tile(128, 128, 64, registers=128),
        "128 x 256": Tile(128, 256, 64, stages=4),
        "128 x 256, persistent": Tile(128, 256, 64, stages=4, is_persistent=True),
    }
    for left in HELD:
        leave_sms(left)  # before any other, 0 changes nothing
        for name, tile in tiles.items():
            with mock.patch.object(triton_backend, "mm_tiles", lambda *_, tile=tile, **__: (tile,)):
                milliseconds(0)  # compiles
                took = {held: statistics.median(milliseconds(held) for _ in range(_REPEATS)) for held in HELD}
            value = ", ".join(f"{held} held {ms:.3f} ms" for held, ms in took.items())
            yield Row(f"tiles of {name}, {left} SMs left", value)
