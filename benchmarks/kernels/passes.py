"""Compile the kernels that pass over values and multiply no matrices, for GPUs that need not be there.

    python -m benchmarks.kernels.passes fp8|head|norms|rotary

It prints, as JSON, what each needs of a GPU and the bytes that it moves for each element: those that quantise weights
to FP8, those of a tile of logits, RMSNorms and rotary embeddings.
"""

import itertools
import json
import sys

import torch

from benchmarks.kernels.kernel_compile import on_gpu
from benchmarks.kernels.kernel_model import GPUS, Launch
from epfsdp2.engine.dense import triton_norms, triton_rotary
from epfsdp2.engine.dense.rotary import Rotation
from epfsdp2.engine.head import triton_tiles
from epfsdp2.engine.head.log_probs import tile_sizes
from epfsdp2.engine.quantise import triton_blocks
from epfsdp2.engine.quantise.blocks import FP8
from epfsdp2.rollout.layout.rollout_config import BLOCK

__all__ = ["fp8", "head", "norms", "rotary"]

_IN_PLACE = ("round_blocks", "write_gradients")


def fp8() -> list[dict]:
    """Compile the kernels of FP8 for experts of Qwen3-30B-A3B, stored in float32 and in bfloat16."""
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


def head() -> list[dict]:
    """Compile the kernels of a tile of logits in every dtype, with entropies and without."""
    found = []
    for arch in GPUS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            launches: list[Launch] = []
            logits = torch.empty(tile_sizes("cuda"), dtype=dtype, device="meta")
            of_rows = torch.empty(len(logits), device="meta")
            labels, sums = of_rows.long(), torch.empty(4, len(logits), device="meta")
            with on_gpu(arch, launches):
                for entropy in (None, of_rows):
                    triton_tiles.reduce_tile(logits, of_rows, labels, sums, entropy is not None)
                    triton_tiles.gradient_of(logits, of_rows, labels, of_rows, of_rows, entropy, of_rows)
            found += [_row(launch, logits.numel()) for launch in launches]
    return found


def norms() -> list[dict]:
    """Compile the kernels of RMSNorms over a head of 128 columns, and over the widest hidden states."""
    found = []
    for arch in GPUS:
        for dtype, width in itertools.product((torch.bfloat16, torch.float32), (128, 2048, 7168)):
            launches: list[Launch] = []
            x, weight = torch.empty(8192, width, dtype=dtype, device="meta"), torch.empty(width, dtype=dtype)
            with on_gpu(arch, launches):
                _, scale = triton_norms.forward(x, weight, 1e-6, 0.0, True)
                triton_norms.backward(x, x, weight, scale, 0.0, True)
            found += [_row(launch, x.numel()) for launch in launches]
    return found


def rotary() -> list[dict]:
    """Compile the kernel of rotary embeddings, of whole heads and of a part of each, forward and backward."""
    found = []
    for arch in GPUS:
        others = Rotation(True, True, "neighbours", rounds_last=True, is_last=True)
        for part, is_backward, rotation in itertools.product((128, 64), (False, True), (Rotation(), others)):
            launches: list[Launch] = []
            x = torch.empty(2, 32, 2048, 128, dtype=torch.bfloat16, device="meta")
            cos = torch.empty(1, 2048, part, dtype=torch.bfloat16, device="meta")
            with on_gpu(arch, launches):
                triton_rotary.rotate(x, cos, cos, rotation, is_backward)
            found += [_row(launch, x.numel()) for launch in launches]
    return found


def _row(launch: Launch, elements: int) -> dict:
    made = launch.compiled
    moved = sum(launch.nbytes.values()) * (2 if made.kernel in _IN_PLACE else 1)  # read and written
    return {
        "kernel": made.kernel,
        "arch": made.arch,
        "dtype": launch.dtype,
        "registers": made.registers,
        "warps": made.warps,
        "stack": made.stack,
        "ctas": made.ctas,
        "bytes_of_an_element": round(moved / elements, 2),
    }


if __name__ == "__main__":
    print(json.dumps({"fp8": fp8, "head": head, "norms": norms, "rotary": rotary}[sys.argv[1]]()))
