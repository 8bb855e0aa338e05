"""Quantisation schemes: one scale per block of a weight, or per row."""

from dataclasses import dataclass
from typing import Literal

import torch

from ..topology.index_ranges import IndexRange
from .blocks import FP8, block_maxima, blocks_of, quantise, round_in_place, scales_of
from .channels import CHANNEL_DTYPES, Channels

Kind = Literal["", "fp8", "int8"]
"""Format of weights with one scale per row (output channel), or ''."""

__all__ = ["Blocks", "Scheme", "scheme_of"]


@dataclass(frozen=True)
class Blocks:
    """FP8 with one scale per block of ``size`` rows and columns; ``held`` is a range of ``[..., rows, columns]``."""

    size: int
    dtype: torch.dtype = FP8

    def sharing(self, held: IndexRange) -> IndexRange:
        """Return the range of the scales that a range of the weight shares."""
        return blocks_of(held, self.size)

    def maxima(self, values: torch.Tensor, held: IndexRange) -> torch.Tensor:
        """Return the largest absolute values of a range, in the shape of ``sharing(held)``."""
        return block_maxima(values, held.low[-2:], self.size)

    def scales(self, maxima: torch.Tensor) -> torch.Tensor:
        """Return float32 scales, given the maxima of the whole weight."""
        return scales_of(maxima)

    def quantise(self, values: torch.Tensor, scales: torch.Tensor, held: IndexRange, into: torch.Tensor) -> None:
        """Write the quantised values of the range ``held`` to ``into``."""
        quantise(values, scales, held.low[-2:], self.size, into)

    def round_in_place(self, values: torch.Tensor) -> None:
        """Replace a whole weight by its quantised and dequantised values."""
        round_in_place(values, self.size)


Scheme = Blocks | Channels


def scheme_of(block: int, channels: Kind) -> Scheme:
    """Return the scheme of a rollout: per row if ``channels`` is set, else per block (``layout/specs.py``)."""
    return Channels(CHANNEL_DTYPES[channels]) if channels else Blocks(block)
