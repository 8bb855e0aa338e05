"""Shards of several ranges (``index_ranges.shard_ranges``) for torch's distributed checkpoint.

DCP takes a DTensor's shard to be one chunk. Gate and up that are each sharded are two, which it writes and reads like
the chunks of two ranks: what is on disk does not depend on who held it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.futures import Future, collect_all

from .dtensor import local_pieces, local_ranges

__all__ = ["ShardWriter", "chunked"]


def chunked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as DCP takes them: those whose shards are several ranges as as many chunks, which are views."""
    return {name: t if len(local_ranges(t)) == 1 else _Chunks.of(t) for name, t in tensors.items()}


class _Chunks(torch.Tensor):
    """A sharded tensor whose chunks on this rank are known to DCP by three methods (``_checkpointable.py``).

    DCP asks for a ``torch.Tensor``: this is one of the global shape, without memory.
    """

    chunks: dict[torch.Size, torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Chunks":
        pieces = [(held, values) for held, values in local_pieces(tensor.detach()) if held.numel]
        made = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape).as_subclass(cls)
        made.chunks = {torch.Size(held.low): values for held, values in pieces}
        return made

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(values), self.size()),
            )
            for chunk, (offset, values) in zip(self.__create_chunk_list__(), self.chunks.items(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, values.size()) for offset, values in self.chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.chunks[index.offset]


class ShardWriter(dcp.HuggingFaceStorageWriter):
    """Writes each rank's chunks to a file of its own; second chunks of a tensor to another.

    A safetensors file has one entry of a name.

    Args:
        number: of this rank's file, from 1; by default the one that its plan has in a save by all ranks.
    """

    def __init__(self, folder: str, number: int | None = None):
        super().__init__(folder, save_distributed=True)
        self._number = number

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        files: list[list[WriteItem]] = [[]]
        seen: dict[str, int] = {}
        for item in plan.items:
            nth = seen[item.index.fqn] = seen.get(item.index.fqn, -1) + 1
            if nth == len(files):
                files.append([])
            files[nth].append(item)
        done = []
        for nth, items in enumerate(files):
            where: Any = plan.storage_data
            if self._number is not None:
                where = {**where, "shard_index": self._number}
            if nth:  # the number of the file, which the writer counts from 1 by rank
                where = {**where, "shard_index": where["shard_index"] + nth * dist.get_world_size()}
            done.append(super().write_data(dataclasses.replace(plan, items=items, storage_data=where), planner))
        if len(done) == 1:
            return done[0]
        return collect_all(done).then(lambda all_: [result for each in all_.value() for result in each.value()])
