"""FP8 values with one scale per block of a weight, bit for bit as vLLM quantises whole weights.

Blocks are square and aligned to the whole weight, not to a shard. So each rank computes its part of a block's maximum
and quantises its shard alone. Source: vLLM ``utils/deep_gemm.py``, ``per_block_cast_to_fp8``.

A GPU with FP8 instructions (compute capability 8.9) runs the kernels in ``triton_blocks.py`` instead.
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
LEAST = 1e-4  # lower bound of a block's maximum, because a block of zeros needs a scale above 0


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
    """Return the largest absolute value of each block that ``values`` touch, as float32 ``[..., blocks, blocks]``.

    Args:
        values: ``[..., rows, columns]`` of a weight; rounded to bfloat16.
        first: index of their first row and first column in the weight.
    """
    if (kernels := _kernels(values.device)) is not None:
        return kernels.block_maxima(values, first, block)
    top, left = (i % block for i in first)
    bottom, right = -(top + values.shape[-2]) % block, -(left + values.shape[-1]) % block
    # Reduce columns before rows, and take amax and amin instead of abs: six times as fast on a CPU.
    of_rows = _largest(pad(values, (left, right)) if left or right else values, block)
    of_rows = pad(of_rows, (0, 0, top, bottom)) if top or bottom else of_rows
    # Rounding is monotonic: round the maximum instead of every value.
    return of_rows.unflatten(-2, (-1, block)).amax(-2).bfloat16().float()


def _largest(values: torch.Tensor, block: int) -> torch.Tensor:
    parts = values.unflatten(-1, (-1, block))
    return torch.maximum(parts.amax(-1), parts.amin(-1).neg_())


def scales_of(maxima: torch.Tensor) -> torch.Tensor:
    """Return the scale of each block, its maximum over FP8's largest value; weight = value * scale."""
    return maxima.clamp(LEAST) / torch.finfo(FP8).max


def quantise(values: torch.Tensor, scales: torch.Tensor, first: Sequence[int], block: int, into: torch.Tensor) -> None:
    """Write ``values`` ``[..., rows, columns]``, rounded to bfloat16, as FP8 to ``into``.

    ``scales`` are those of the blocks that ``values`` touch; ``first`` and ``block`` are as in ``block_maxima``.
    """
    if (kernels := _kernels(values.device)) is not None:
        return kernels.quantise(values, scales, first, block, into)
    if values.dim() > 2:  # one matrix at a time, to hold only one in float32
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
    for i, factors in enumerate(inverse):  # the rows of one block fit into a CPU's cache
        own = slice(max(0, i * block - top), min(rows, (i + 1) * block - top))
        count = own.stop - own.start
        into[own].copy_(wide[:count].copy_(rounded[:count].copy_(values[own])).mul_(factors))


def dequantise(values: torch.Tensor, scales: torch.Tensor, block: int, into: torch.Tensor) -> None:
    """Write a whole FP8 weight ``[rows, columns]``, multiplied by its blocks' scales in float32, to ``into``."""
    rows, columns = values.shape
    spread = scales.repeat_interleave(block, 0)[:rows] if rows > block else scales
    if values.device.type == "cpu":  # a table is seven times as fast as torch's scalar conversion
        wide = _FP8_VALUES.index_select(0, values.view(torch.uint8).flatten().int()).view(rows, columns)
    else:
        wide = values.float()
    into.copy_(wide.mul_(spread.repeat_interleave(block, -1)[:, :columns]))


def round_in_place(values: torch.Tensor, block: int) -> None:
    """Replace whole matrices ``[..., rows, columns]`` by their quantised and dequantised values."""
    if (kernels := _kernels(values.device)) is not None:
        return kernels.round_in_place(values, block)
    for matrix in values.flatten(0, -3) if values.dim() > 2 else [values]:
        for part in matrix.split(block if matrix.device.type == "cpu" else matrix.shape[0]):
            scales = scales_of(block_maxima(part, (0, 0), block))
            rounded = torch.empty(part.shape, dtype=FP8, device=part.device)
            quantise(part, scales, (0, 0), block, rounded)
            dequantise(rounded, scales, block, part)
