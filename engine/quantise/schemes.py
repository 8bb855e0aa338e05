"""Quantisation schemes: one scale per block of a weight (``blocks.py``), or per row.

With scales of rows, FP8 or INT8 values are bit for bit as compressed-tensors quantises.
A row is an output channel. Scales and quotients are bfloat16, because compressed-tensors computes in the dtype of the
weights. A row may be sharded: its maximum is reduced over the parts. Source: compressed_tensors
``quantization/utils/helpers.py``, ``calculate_qparams``, and ``lifecycle/forward.py``, ``quantize``.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ..topology.index_ranges import IndexRange
from .blocks import Blocks

__all__ = ["CHANNEL_DTYPES", "Channels", "Scheme", "scheme_of"]

CHANNEL_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# Smallest value, largest value, and half their range, by which the library divides.
_RANGES = {torch.float8_e4m3fn: (-448.0, 448.0, 448.0), torch.int8: (-128.0, 127.0, 127.5)}
_AT_ONCE = 1 << 20  # elements converted to bfloat16 at once on a CPU


@dataclass(frozen=True)
class Channels:
    """FP8 or INT8 with one scale per row. The methods are those of ``blocks.Blocks``; ``held`` is not needed."""

    dtype: torch.dtype

    def sharing(self, held: IndexRange) -> IndexRange:
        return IndexRange((*held.low[:-1], 0), (*held.high[:-1], 1))

    def maxima(self, values: torch.Tensor, held: IndexRange | None = None) -> torch.Tensor:
        found = torch.maximum(values.amax(-1, keepdim=True), values.amin(-1, keepdim=True).neg_())
        # Rounding is monotonic: round the maximum instead of every value.
        return found.bfloat16().float()

    def scales(self, maxima: torch.Tensor) -> torch.Tensor:
        """Return the scale of each row, rounded to bfloat16, as float32; weight = value * scale."""
        scales = maxima.bfloat16() / _RANGES[self.dtype][2]
        return scales.masked_fill_(scales == 0, torch.finfo(torch.bfloat16).eps).float()

    def quantise(self, values: torch.Tensor, scales: torch.Tensor, held: IndexRange | None, into: torch.Tensor) -> None:
        """Write ``[..., rows, columns]``, rounded to bfloat16 and divided by their rows' scales, to ``into``."""
        if values.dim() > 2:
            for matrix, own, target in zip(values, scales, into, strict=True):
                self.quantise(matrix, own, held, target)
            return
        low, high, _ = _RANGES[self.dtype]
        rows = _rows_at_once(values)
        for part, own, target in zip(values.split(rows), scales.split(rows), into.split(rows), strict=True):
            quotient = (part.bfloat16() / own.bfloat16()).clamp_(low, high)
            target.copy_(quotient if self.dtype.is_floating_point else quotient.round_())

    def round_in_place(self, values: torch.Tensor) -> None:
        for matrix in values.flatten(0, -3) if values.dim() > 2 else [values]:
            for part in matrix.split(_rows_at_once(matrix)):
                scales = self.scales(self.maxima(part))
                rounded = torch.empty(part.shape, dtype=self.dtype, device=part.device)
                self.quantise(part, scales, None, rounded)
                part.copy_(rounded.float().mul_(scales))


Scheme = Blocks | Channels


def scheme_of(block: int, channels: Literal["", "fp8", "int8"]) -> Scheme:
    """Return the scheme of a rollout: per row if ``channels`` is set, else per block (``layout/specs.py``)."""
    return Channels(CHANNEL_DTYPES[channels]) if channels else Blocks(block)


def _rows_at_once(matrix: torch.Tensor) -> int:
    rows, columns = matrix.shape
    return max(1, _AT_ONCE // max(1, columns) if matrix.device.type == "cpu" else rows)
