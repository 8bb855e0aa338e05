"""What a rank packs into a round of an exchange, and unpacks: blocks of its shards, and where their bytes go."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...engine.lora.merge import LocalValues
from ...engine.topology.dtensor import local_range, local_tensor
from ...engine.topology.index_ranges import IndexRange, bounding_range
from ..layout.transfer_plan import Transfer
from ..layout.vllm_layout import Tensor

__all__ = [
    "LocalBlock",
    "LocalShards",
    "PackedBox",
    "PieceTransfers",
    "SendBlock",
    "read_as",
    "shared_rows",
    "starts",
    "write_as",
]


@dataclass(frozen=True)
class PieceTransfers:
    """A rank's part in a piece.

    Args:
        given: what it sends when the round begins, and what its worker takes of its own.
        taken: what reaches it.
    """

    tensor: Tensor
    given: list[Transfer]
    taken: list[Transfer]


@dataclass(frozen=True)
class PackedBox:
    """A box that a rank writes when a round is made ready.

    Args:
        inside: where it is in what is at hand.
        to: its bytes in what is sent, or in what is kept for the rank's own worker.
    """

    inside: tuple[slice, ...]
    to: slice
    is_kept: bool


@dataclass(frozen=True)
class SendBlock:
    """What a rank writes of a tensor at a time.

    Args:
        rows: of the shard, around all parts, which are cast before they are taken apart; None if nothing is.
        shape: of these rows.
        parts: of the rows, else of the shard.
    """

    tensor: Tensor
    rows: tuple[slice, ...] | None
    shape: tuple[int, ...]
    parts: list[PackedBox]

    @property
    def cast_bytes(self) -> int:
        return math.prod(self.shape) * self.tensor.itemsize if self.rows else 0


@dataclass(frozen=True)
class LocalBlock:
    """A box that a rank's own worker takes of its shard.

    Args:
        inside: where it is in the shard.
        kept: its bytes in what was kept; None if it is to be read from the shard.
    """

    tensor: Tensor
    box: IndexRange
    inside: tuple[slice, ...]
    kept: slice | None


class LocalShards:
    """What this rank holds of the trainer's tensors, looked up once each.

    Args:
        boxes: of the shards by the tensor's name, which stay as they are from sync to sync.
        values: what there is of a tensor; its shard by default.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
        boxes: dict[str, IndexRange],
        values: LocalValues | None,
    ):
        self._tensors, self._dtypes, self._boxes = tensors, dtypes, boxes
        self._values = values or (lambda name, tensor: local_tensor(tensor).detach())
        self._local: dict[str, torch.Tensor] = {}

    def dtype(self, name: str) -> torch.dtype:
        """In which a tensor is sent."""
        return self._dtypes[name]

    def is_cast(self, name: str) -> bool:
        """Whether a tensor is stored in another dtype than it is sent in."""
        return self._tensors[name].dtype != self._dtypes[name]

    def box(self, name: str) -> IndexRange:
        """Where the shard of a tensor is."""
        if name not in self._boxes:
            self._boxes[name] = local_range(self._tensors[name])
        return self._boxes[name]

    def values(self, name: str) -> torch.Tensor:
        """The shard's values, as they are stored."""
        if name not in self._local:
            with torch.no_grad():
                self._local[name] = self._values(name, self._tensors[name])
        return self._local[name]

    def keep(self, names: Collection[str]) -> None:
        """Let go of all others: what is merged with an adapter is memory of its own."""
        self._local = {name: local for name, local in self._local.items() if name in names}


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each part begins that follows the ones before it."""
    return [sum(sizes[:i]) for i in range(len(sizes))]


def write_as(flat: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Cast and copy in one pass, where the bytes are aligned for ``dtype``."""
    if flat.storage_offset() % dtype.itemsize == 0:
        flat.view(dtype).view(values.shape).copy_(values)
    else:
        flat.copy_(values.to(flat.device, dtype).reshape(-1).contiguous().view(torch.uint8))


def read_as(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (flat if flat.storage_offset() % dtype.itemsize == 0 else flat.clone()).view(dtype)


def shared_rows(boxes: Sequence[IndexRange], most: int) -> Iterator[IndexRange]:
    """The rows of which these boxes are columns, at most so many elements at a time.

    Nothing, if they are anything else or leave columns out, or if a row has more elements.
    """
    if len(boxes) < 2 or not boxes[0].low:
        return
    rows = bounding_range(boxes)
    each = most // (rows.numel // rows.shape[0])
    are_columns = any(box.shape[-1] < rows.shape[-1] for box in boxes)
    if each and are_columns and rows.numel <= sum(box.numel for box in boxes):
        for first in range(rows.low[0], rows.high[0], each):
            yield rows.with_dim(0, first, min(first + each, rows.high[0]))
