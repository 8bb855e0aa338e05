"""Quantisation schemes: one scale per block of a weight, or per row."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ..topology.index_ranges import IndexRange
from .blocks import FP8, block_maxima, blocks_of, quantise, round_in_place, scales_of
from .channels import CHANNEL_DTYPES, quantise_rows, round_rows_in_place, row_maxima, row_scales

Kind = Literal["", "fp8", "int8"]
"""Format of weights with one scale per row (output channel), or ''."""

__all__ = ["Blocks", "Channels", "Scheme", "scheme_of"]


class Scheme(Protocol):
    """Quantises a part of a weight with the scales of the whole weight."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the quantised values."""
        ...

    def sharing(self, held: IndexRange) -> IndexRange:
        """Return the range of the scale tensor that covers a range of the weight ``[..., rows, columns]``."""
        ...

    def maxima(self, values: torch.Tensor, held: IndexRange) -> torch.Tensor:
        """Return the largest absolute values of a range, in the shape of ``sharing(held)``."""
        ...

    def scales(self, maxima: torch.Tensor) -> torch.Tensor:
        """Return float32 scales, given the maxima of the whole weight."""
        ...

    def quantise(self, values: torch.Tensor, scales: torch.Tensor, held: IndexRange, into: torch.Tensor) -> None:
        """Write the quantised values of the range ``held`` to ``into``."""
        ...

    def round_in_place(self, values: torch.Tensor) -> None:
        """Replace a whole weight by its quantised and dequantised values."""
        ...


@dataclass(frozen=True)
class Blocks:
    """FP8 with one scale per block of ``size`` rows and columns (``blocks.py``)."""

    size: int
    dtype: torch.dtype = FP8

    def sharing(self, held: IndexRange) -> IndexRange:
        return blocks_of(held, self.size)

    def maxima(self, values: torch.Tensor, held: IndexRange) -> torch.Tensor:
        return block_maxima(values, held.low[-2:], self.size)

    def scales(self, maxima: torch.Tensor) -> torch.Tensor:
        return scales_of(maxima)

    def quantise(self, values: torch.Tensor, scales: torch.Tensor, held: IndexRange, into: torch.Tensor) -> None:
        quantise(values, scales, held.low[-2:], self.size, into)

    def round_in_place(self, values: torch.Tensor) -> None:
        round_in_place(values, self.size)


@dataclass(frozen=True)
class Channels:
    """FP8 or INT8 with one scale per row (``channels.py``)."""

    dtype: torch.dtype

    def sharing(self, held: IndexRange) -> IndexRange:
        return IndexRange((*held.low[:-1], 0), (*held.high[:-1], 1))

    def maxima(self, values: torch.Tensor, held: IndexRange) -> torch.Tensor:
        return row_maxima(values)

    def scales(self, maxima: torch.Tensor) -> torch.Tensor:
        return row_scales(maxima, self.dtype)

    def quantise(self, values: torch.Tensor, scales: torch.Tensor, held: IndexRange, into: torch.Tensor) -> None:
        quantise_rows(values, scales, into)

    def round_in_place(self, values: torch.Tensor) -> None:
        round_rows_in_place(values, self.dtype)


def scheme_of(block: int, channels: Kind) -> Scheme:
    """Return the scheme of a rollout: per row if ``channels`` is set, else per block (``layout/specs.py``)."""
    return Channels(CHANNEL_DTYPES[channels]) if channels else Blocks(block)
