"""How the elements of a weight share scales: by blocks, or by rows."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ..topology.index_ranges import IndexRange
from .blocks import FP8, block_maxima, blocks_of, quantise, round_in_place, scales_of
from .channels import CHANNEL_DTYPES, quantise_rows, round_rows_in_place, row_maxima, row_scales

Kind = Literal["", "fp8", "int8"]
"""What weights with one scale for each row, an output channel, are held in."""

__all__ = ["Blocks", "Channels", "Scheme", "scheme_of"]


class Scheme(Protocol):
    """What quantises a part of a weight by the scales of the whole weight."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        ...

    def sharing(self, held: IndexRange) -> IndexRange:
        """Return the scales of a range of a weight ``[..., rows, columns]``, in the tensor of its scales."""
        ...

    def maxima(self, values: torch.Tensor, held: IndexRange) -> torch.Tensor:
        """Return the largest absolute values of a range, in the shape of its scales."""
        ...

    def scales(self, maxima: torch.Tensor) -> torch.Tensor:
        """Return the scales of whole weights with these maxima, in float32."""
        ...

    def quantise(self, values: torch.Tensor, scales: torch.Tensor, held: IndexRange, into: torch.Tensor) -> None:
        """Write the values of a range, whose scales these are, to ``into``."""
        ...

    def round_in_place(self, values: torch.Tensor) -> None:
        """Replace a whole weight by what a rollout has of it: values times scales."""
        ...


@dataclass(frozen=True)
class Blocks:
    """FP8 with one scale for each block of ``size`` rows and columns (``blocks.py``)."""

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
    """FP8 or INT8 with one scale for each row (``channels.py``)."""

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
    """Return what a rollout holds weights in: ``channels``, or by blocks (``layout/specs.py``, ``Rollout``)."""
    return Channels(CHANNEL_DTYPES[channels]) if channels else Blocks(block)
