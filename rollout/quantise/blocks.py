"""FP8 values with one scale for each block of a weight, bit for bit as vLLM makes them of whole weights.

A block is square and counted from a weight's first row and column, wherever a shard of it begins. So the largest value
of a block can be computed in parts, and a part quantised by itself. Source: vLLM ``utils/deep_gemm.py``,
``per_block_cast_to_fp8``.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ...engine.topology.index_ranges import IndexRange

__all__ = ["FP8", "block_maxima", "blocks_of", "quantise", "round_in_place", "scales_of"]

FP8 = torch.float8_e4m3fn
_LEAST = 1e-4  # of a block's largest value, so that a block of zeros has a scale


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
    top, left = (i % block for i in first)
    bottom, right = -(top + values.shape[-2]) % block, -(left + values.shape[-1]) % block
    sizes = values.bfloat16().abs()
    if top or left or bottom or right:
        sizes = pad(sizes, (left, right, top, bottom))
    of_rows = sizes.unflatten(-1, (-1, block)).amax(-1)  # columns before rows: twice as fast on a CPU as both at once
    return of_rows.unflatten(-2, (-1, block)).amax(-2).float()


def scales_of(maxima: torch.Tensor) -> torch.Tensor:
    """Return the factors by which FP8 values are multiplied to give the weight, of blocks with these maxima."""
    return maxima.clamp(_LEAST) / torch.finfo(FP8).max


def quantise(values: torch.Tensor, scales: torch.Tensor, first: Sequence[int], block: int, into: torch.Tensor) -> None:
    """Write ``values``, rounded to bfloat16, as FP8 to ``into``.

    Args:
        scales: of the blocks that they touch; see ``block_maxima``.
        into: of the same shape.
    """
    (top, left), (rows, columns) = (i % block for i in first), values.shape[-2:]
    inverse = (1.0 / scales).repeat_interleave(block, -1)[..., left : left + columns]
    if values.device.type != "cpu":
        spread = inverse.repeat_interleave(block, -2)[..., top : top + rows, :]
        into.copy_(values.bfloat16().float().mul_(spread))
        return
    for i in range(inverse.shape[-2]):  # rows of one block, which a CPU's cache holds
        own = slice(max(0, i * block - top), min(rows, (i + 1) * block - top))
        into[..., own, :].copy_(values[..., own, :].bfloat16().float().mul_(inverse[..., i : i + 1, :]))


def round_in_place(values: torch.Tensor, block: int) -> None:
    """Replace whole matrices ``[..., rows, columns]`` by what a rollout has of them: FP8 values times their scales."""
    for matrix in values.flatten(0, -3) if values.dim() > 2 else [values]:
        scales = scales_of(block_maxima(matrix, (0, 0), block))
        rounded = torch.empty(matrix.shape, dtype=FP8, device=matrix.device)
        quantise(matrix, scales, (0, 0), block, rounded)
        dequantise(rounded, scales, block, matrix)


def dequantise(values: torch.Tensor, scales: torch.Tensor, block: int, into: torch.Tensor) -> None:
    """Write FP8 values ``[rows, columns]`` times the scales of their blocks, computed in float32, to ``into``."""
    rows, columns = values.shape
    of_columns = scales.repeat_interleave(block, -1)[:, :columns]
    for i, own in enumerate(of_columns):
        at = slice(i * block, min(rows, (i + 1) * block))
        into[at].copy_(values[at].float().mul_(own))
