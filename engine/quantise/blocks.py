"""FP8 values with one scale for each block of a weight, bit for bit as vLLM makes them of whole weights.

A block is square and counted from a weight's first row and column, wherever a shard of it begins. So the largest value
of a block can be computed in parts, and a part quantised by itself. Source: vLLM ``utils/deep_gemm.py``,
``per_block_cast_to_fp8``.

A GPU with instructions for FP8 (compute capability 8.9) computes all of it by the kernels in ``triton_blocks.py``.
"""

import functools
import importlib.util
from collections.abc import Sequence
from types import ModuleType

import torch
from torch.nn.functional import pad

from ..topology.index_ranges import IndexRange

__all__ = ["FP8", "LEAST", "block_maxima", "blocks_of", "dequantise", "quantise", "round_in_place", "scales_of"]

FP8 = torch.float8_e4m3fn
_FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float()
LEAST = 1e-4  # of a block's largest value, so that a block of zeros has a scale


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    if importlib.util.find_spec("triton") is None:
        return None
    from . import triton_blocks

    return triton_blocks


def blocks_of(held: IndexRange, block: int) -> IndexRange:
    """Return the blocks that a range of ``[..., rows, columns]`` touches, in the last two dims."""
    low = (*held.low[:-2], *(i // block for i in held.low[-2:]))
    return IndexRange(low, (*held.high[:-2], *(-(-i // block) for i in held.high[-2:])))


def block_maxima(values: torch.Tensor, first: Sequence[int], block: int) -> torch.Tensor:
    """Return the largest absolute value in each block that ``values`` touch, as float32 ``[..., blocks, blocks]``.

    Args:
        values: ``[..., rows, columns]`` of a weight; they are rounded to bfloat16.
        first: number of their first row and first column in the weight.
    """
    if (kernels := _kernels(values.device)) is not None:
        return kernels.block_maxima(values, first, block)
    top, left = (i % block for i in first)
    bottom, right = -(top + values.shape[-2]) % block, -(left + values.shape[-1]) % block
    # Columns before rows, and largest and smallest instead of absolute values: six times as fast on a CPU.
    of_rows = _largest(pad(values, (left, right)) if left or right else values, block)
    of_rows = pad(of_rows, (0, 0, top, bottom)) if top or bottom else of_rows
    # The largest of rounded values is the largest, rounded.
    return of_rows.unflatten(-2, (-1, block)).amax(-2).bfloat16().float()


def _largest(values: torch.Tensor, block: int) -> torch.Tensor:
    parts = values.unflatten(-1, (-1, block))
    return torch.maximum(parts.amax(-1), parts.amin(-1).neg_())


def scales_of(maxima: torch.Tensor) -> torch.Tensor:
    """Return the factors by which FP8 values are multiplied to give the weight, of blocks with these maxima."""
    return maxima.clamp(LEAST) / torch.finfo(FP8).max


def quantise(values: torch.Tensor, scales: torch.Tensor, first: Sequence[int], block: int, into: torch.Tensor) -> None:
    """Write ``values``, rounded to bfloat16, as FP8 to ``into``.

    Args:
        values: ``[..., rows, columns]``.
        scales: of the blocks that they touch; see ``block_maxima``.
        into: of the same shape.
    """
    if (kernels := _kernels(values.device)) is not None:
        return kernels.quantise(values, scales, first, block, into)
    if values.dim() > 2:  # one matrix at a time, so that only one is in float32
        for matrix, own, target in zip(values, scales, into, strict=True):
            quantise(matrix, own, first, block, target)
        return
    (top, left), (rows, columns) = (i % block for i in first), values.shape
    inverse = (1.0 / scales).repeat_interleave(block, -1)[:, left : left + columns]
    if values.device.type != "cpu":
        spread = inverse.repeat_interleave(block, 0)[top : top + rows]
        into.copy_(values.bfloat16().float().mul_(spread))
        return
    rounded = torch.empty(min(block, rows), columns, dtype=torch.bfloat16)
    wide = torch.empty(rounded.shape)
    for i, factors in enumerate(inverse):  # rows of one block, which a CPU's cache holds
        own = slice(max(0, i * block - top), min(rows, (i + 1) * block - top))
        count = own.stop - own.start
        into[own].copy_(wide[:count].copy_(rounded[:count].copy_(values[own])).mul_(factors))


def dequantise(values: torch.Tensor, scales: torch.Tensor, block: int, into: torch.Tensor) -> None:
    """Write whole FP8 values ``[rows, columns]`` times the scales of their blocks, in float32, to ``into``."""
    rows, columns = values.shape
    spread = scales.repeat_interleave(block, 0)[:rows] if rows > block else scales
    if values.device.type == "cpu":  # where torch converts them one by one, and looks them up seven times as fast
        wide = _FP8_VALUES.index_select(0, values.view(torch.uint8).flatten().int()).view(rows, columns)
    else:
        wide = values.float()
    into.copy_(wide.mul_(spread.repeat_interleave(block, -1)[:, :columns]))


def round_in_place(values: torch.Tensor, block: int) -> None:
    """Replace whole matrices ``[..., rows, columns]`` by what a rollout has of them: FP8 values times their scales."""
    if (kernels := _kernels(values.device)) is not None:
        return kernels.round_in_place(values, block)
    for matrix in values.flatten(0, -3) if values.dim() > 2 else [values]:
        for part in matrix.split(block if matrix.device.type == "cpu" else matrix.shape[0]):
            scales = scales_of(block_maxima(part, (0, 0), block))
            rounded = torch.empty(part.shape, dtype=FP8, device=part.device)
            quantise(part, scales, (0, 0), block, rounded)
            dequantise(rounded, scales, block, part)
