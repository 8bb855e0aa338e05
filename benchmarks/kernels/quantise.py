"""Compile the kernels that quantise weights to FP8, for GPUs that need not be there.

    python -m benchmarks.kernels.quantise

It prints, as JSON, what each needs of a GPU and the bytes that it moves for each element of a weight.
"""

import json

import torch

from benchmarks.kernels.kernel_compile import on_gpu
from benchmarks.kernels.kernel_model import Launch
from epfsdp2.rollout.layout.rollout_config import BLOCK
from epfsdp2.rollout.quantise import triton_blocks
from epfsdp2.rollout.quantise.blocks import FP8

__all__ = ["rows"]


def rows() -> list[dict]:
    """Compile the kernels for experts of Qwen3-30B-A3B, stored in float32 and in bfloat16."""
    found = []
    for arch in (90, 100):
        for dtype in (torch.float32, torch.bfloat16):
            launches: list[Launch] = []
            weight = torch.empty(16, 1536, 2048, dtype=dtype, device="meta")
            with on_gpu(arch, launches):
                maxima = triton_blocks.block_maxima(weight, (0, 0), BLOCK)
                triton_blocks.quantise(weight, maxima, (0, 0), BLOCK, weight.to(FP8))
                triton_blocks.round_in_place(weight, BLOCK)
            found += [_row(launch, weight.numel()) for launch in launches]
    return found


def _row(launch: Launch, elements: int) -> dict:
    made = launch.compiled
    moved = sum(launch.nbytes.values()) * (2 if made.kernel == "round_blocks" else 1)  # read and written
    return {
        "kernel": made.kernel,
        "arch": made.arch,
        "dtype": launch.dtype,
        "registers": made.registers,
        "stack": made.stack,
        "ctas": made.ctas,
        "bytes_of_an_element": round(moved / elements, 2),
    }


if __name__ == "__main__":
    print(json.dumps(rows()))
