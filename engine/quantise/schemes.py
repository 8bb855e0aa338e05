"""Quantisation schemes: one scale per block of a weight, or per row."""

from typing import Literal

from .blocks import Blocks
from .channels import CHANNEL_DTYPES, Channels

__all__ = ["Scheme", "scheme_of"]

Scheme = Blocks | Channels


def scheme_of(block: int, channels: Literal["", "fp8", "int8"]) -> Scheme:
    """Return the scheme of a rollout: per row if ``channels`` is set, else per block (``layout/specs.py``)."""
    return Channels(CHANNEL_DTYPES[channels]) if channels else Blocks(block)
