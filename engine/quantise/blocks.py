"""FP8 values with one scale per block of a weight, bit for bit as vLLM quantises whole weights.

Blocks are square and aligned to the whole weight, not to a shard. So each rank computes its part of a block's maximum
and quantises its shard alone. Source: vLLM ``utils/deep_gemm.py``, ``per_block_cast_to_fp8``.

A GPU with FP8 instructions (compute capability 8.9) runs the kernels in ``triton_blocks.py`` instead.
"""

import functools
import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch
from torch.nn.functional import pad

from ..topology.index_ranges import IndexRange

__all__ = ["FP8", "LEAST", "Blocks"]

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


@dataclass(frozen=True)
class Blocks:
    """FP8 with one scale per block of ``size`` rows and columns; ``held`` is a range of ``[..., rows, columns]``."""

    size: int
    dtype: torch.dtype = FP8

    def sharing(self, held: IndexRange) -> IndexRange:
        """Return the range of the scales that a range of the weight shares: the blocks that it touches."""
        low = (*held.low[:-2], *(i // self.size for i in held.low[-2:]))
        return IndexRange(low, (*held.high[:-2], *(-(-i // self.size) for i in held.high[-2:])))

    def maxima(self, values: torch.Tensor, held: IndexRange) -> torch.Tensor:
        """Return the largest absolute values of a range, rounded to bfloat16, as float32 of ``sharing(held)``."""
        first, block = held.low[-2:], self.size
        if (kernels := _kernels(values.device)) is not None:
            return kernels.block_maxima(values, first, block)
        top, left = (i % block for i in first)
        bottom, right = -(top + values.shape[-2]) % block, -(left + values.shape[-1]) % block
        # Reduce columns before rows, and take amax and amin instead of abs: six times as fast on a CPU.
        parts = (pad(values, (left, right)) if left or right else values).unflatten(-1, (-1, block))
        of_rows = torch.maximum(parts.amax(-1), parts.amin(-1).neg_())
        of_rows = pad(of_rows, (0, 0, top, bottom)) if top or bottom else of_rows
        # Rounding is monotonic: round the maximum instead of every value.
        return of_rows.unflatten(-2, (-1, block)).amax(-2).bfloat16().float()

    def scales(self, maxima: torch.Tensor) -> torch.Tensor:
        """Return float32 scales, given the maxima of the whole weight; weight = value * scale."""
        return maxima.clamp(LEAST) / torch.finfo(FP8).max

    def quantise(self, values: torch.Tensor, scales: torch.Tensor, held: IndexRange, into: torch.Tensor) -> None:
        """Write the values of the range ``held``, rounded to bfloat16, as FP8 to ``into``; ``scales`` are its own."""
        first, block = held.low[-2:], self.size
        if (kernels := _kernels(values.device)) is not None:
            return kernels.quantise(values, scales, first, block, into)
        if values.dim() > 2:  # one matrix at a time, to hold only one in float32
            for matrix, own, target in zip(values, scales, into, strict=True):
                self.quantise(matrix, own, held, target)
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

    def round_in_place(self, values: torch.Tensor) -> None:
        """Replace whole matrices ``[..., rows, columns]`` by their quantised and dequantised values."""
        if (kernels := _kernels(values.device)) is not None:
            return kernels.round_in_place(values, self.size)
        for matrix in values.flatten(0, -3) if values.dim() > 2 else [values]:
            for part in matrix.split(self.size if matrix.device.type == "cpu" else matrix.shape[0]):
                held = IndexRange.of(part.shape)
                scales = self.scales(self.maxima(part, held))
                rounded = torch.empty(part.shape, dtype=FP8, device=part.device)
                self.quantise(part, scales, held, rounded)
                self._dequantise(rounded, scales, part)

    def _dequantise(self, values: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> None:
        rows, columns = values.shape
        spread = scales.repeat_interleave(self.size, 0)[:rows] if rows > self.size else scales
        if values.device.type == "cpu":  # a table is seven times as fast as torch's scalar conversion
            wide = _FP8_VALUES.index_select(0, values.view(torch.uint8).flatten().int()).view(rows, columns)
        else:
            wide = values.float()
        into.copy_(wide.mul_(spread.repeat_interleave(self.size, -1)[:, :columns]))
