"""Blocks of a rank's shards that a round of an exchange packs, with their byte ranges in the buffers."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...engine.lora.merge import LocalValues
from ...engine.topology.dtensor import local_ranges, local_tensor
from ...engine.topology.index_ranges import IndexRange, bounding_range
from ..layout.specs import TensorSpec
from ..layout.transfer_plan import Transfer

__all__ = [
    "LocalBlock",
    "LocalShards",
    "PackedPart",
    "PieceTransfers",
    "SendBlock",
    "read_as",
    "enclosing_rows",
    "offsets",
    "write_as",
]


@dataclass(frozen=True)
class PieceTransfers:
    """The transfers of a piece in which this rank takes part.

    Args:
        outgoing: what it sends in the round's first all-to-all, and what stays on this rank for its worker.
        incoming: what it receives.
    """

    tensor: TensorSpec
    outgoing: list[Transfer]
    incoming: list[Transfer]


@dataclass(frozen=True)
class PackedPart:
    """A part of a ``SendBlock`` and the bytes that it is written to.

    Args:
        inside: its index inside the block's rows or, without rows, inside the shard.
        to: its byte range in the send buffer, or in the local buffer if ``is_local``.
        is_local: whether it is for this rank's own worker.
    """

    inside: tuple[slice, ...]
    to: slice
    is_local: bool


@dataclass(frozen=True)
class SendBlock:
    """One packing step of a tensor.

    Args:
        rows: index of the rows of the local shard that enclose all parts and are cast to the wire dtype before they are
            split; None when nothing has to be cast first.
        shape: shape of these rows.
        parts: parts of the rows or, without rows, of the shard.
    """

    tensor: TensorSpec
    rows: tuple[slice, ...] | None
    shape: tuple[int, ...]
    parts: list[PackedPart]

    @property
    def cast_bytes(self) -> int:
        return math.prod(self.shape) * self.tensor.itemsize if self.rows else 0


@dataclass(frozen=True)
class LocalBlock:
    """A block of a rank's own shard that its own worker needs.

    Args:
        inside: its index inside the shard.
        buffer_range: its byte range in the local buffer if it was cast with what is sent; None to read it from the
            shard.
    """

    tensor: TensorSpec
    block: IndexRange
    inside: tuple[slice, ...]
    buffer_range: slice | None


class LocalShards:
    """The local shards of the trainer's tensors, computed once per sync.

    Args:
        blocks: cache of each shard's ranges by the tensor's name, kept from sync to sync.
        values: returns the values to send for a tensor; its local shard by default.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
        blocks: dict[str, tuple[IndexRange, ...]],
        values: LocalValues | None,
    ):
        self._tensors, self._dtypes, self._blocks = tensors, dtypes, blocks
        self._values = values or (lambda name, tensor: local_tensor(tensor).detach())
        self._local: dict[str, torch.Tensor] = {}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is sent."""
        return self._dtypes[name]

    def is_cast(self, name: str) -> bool:
        """Tell whether a tensor is sent in another dtype than it is stored in."""
        return self._tensors[name].dtype != self._dtypes[name]

    def ranges(self, name: str) -> tuple[IndexRange, ...]:
        """Return the ranges of a tensor that this rank's shard holds."""
        if name not in self._blocks:
            self._blocks[name] = local_ranges(self._tensors[name])
        return self._blocks[name]

    def values(self, name: str) -> torch.Tensor:
        """Return the shard's values in the dtype in which they are stored; the tensor has to be held."""
        return self._local[name]

    def hold(self, names: Collection[str]) -> None:
        """Compute the values of these tensors in their order, and free those of all others.

        Every rank holds all tensors of a round, because merging an adapter is collective.
        """
        self._local = {name: local for name, local in self._local.items() if name in names}
        with torch.no_grad():
            for name in names:
                if name not in self._local:
                    self._local[name] = self._values(name, self._tensors[name])


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the exclusive prefix sums of ``sizes``."""
    return [sum(sizes[:i]) for i in range(len(sizes))]


def write_as(flat: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Write ``values`` as ``dtype`` into the uint8 tensor ``flat``; casts and copies in one pass if it is aligned."""
    if flat.storage_offset() % dtype.itemsize == 0:
        flat.view(dtype).view(values.shape).copy_(values)
    else:
        flat.copy_(values.to(flat.device, dtype).reshape(-1).contiguous().view(torch.uint8))


def read_as(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View the uint8 tensor ``flat`` as ``dtype``, of a copy if it is not aligned."""
    return (flat if flat.storage_offset() % dtype.itemsize == 0 else flat.clone()).view(dtype)


def enclosing_rows(blocks: Sequence[IndexRange], max_numel: int) -> Iterator[IndexRange]:
    """Yield the rows that blocks of columns together cover, at most ``max_numel`` elements at a time.

    Yields nothing if the blocks are not columns of the same rows, leave columns out, or if a row is larger.
    """
    if len(blocks) < 2 or not blocks[0].low:
        return
    rows = bounding_range(blocks)
    each = max_numel // (rows.numel // rows.shape[0])
    are_columns = any(block.shape[-1] < rows.shape[-1] for block in blocks)
    if each and are_columns and rows.numel <= sum(block.numel for block in blocks):
        for first in range(rows.low[0], rows.high[0], each):
            yield rows.with_dim(0, first, min(first + each, rows.high[0]))
