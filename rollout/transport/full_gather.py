"""Gathers full tensors from sharded parameters, one layer at a time.

Every parameter, dense or expert, is sharded over exactly the ranks of one replica (``engine/topology/mesh.py``). So one
all-gather of bytes gathers all shards of a layer, where gathering tensor by tensor would take two collectives for each
expert weight. The next gather is started before a finished one is consumed.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from ...engine.lora.merge import AdapterUse, LocalValues, adapter_weights, local_values, weights
from ...engine.topology.dtensor import persistent_buffers, shard_steps
from ...engine.topology.index_ranges import IndexRange, chunk_range, shard_ranges, slices_in_shard
from ...engine.topology.mesh import Meshes
from .report import Traffic

__all__ = ["GatheredTensor", "Rows", "assemble", "gather", "gather_bytes", "narrower"]

_ALIGNMENT = 16  # bytes; enough to view the flat buffer as any dtype


@dataclass(frozen=True)
class GatheredTensor:
    """The gathered shards of a tensor, in a buffer that is reused: valid until the next one is requested.

    Attributes:
        is_whole: False if these are only some rows of each shard.
    """

    name: str
    shape: torch.Size
    shards: list[tuple[IndexRange, torch.Tensor]]
    is_whole: bool = True

    def assemble(self, max_bytes: int) -> Iterator["Rows"]:
        """Yield the full tensor or, of a part, runs of consecutive rows of at most ``max_bytes`` each."""
        block = IndexRange.of(self.shape)
        if self.is_whole:
            yield Rows(self.name, None, _assemble_block(block, self.shards))
            return
        runs: dict[tuple[int, int], list[tuple[IndexRange, torch.Tensor]]] = {}
        for held, values in self.shards:
            runs.setdefault((held.low[0], held.high[0]), []).append((held, values))
        itemsize = self.shards[0][1].itemsize
        count = max(1, max_bytes // (self.shape[1:].numel() * itemsize))
        for (low, high), shards in runs.items():
            for first in range(low, high, count):
                yield Rows(
                    self.name, first, _assemble_block(block.with_dim(0, first, min(first + count, high)), shards)
                )


def _assemble_block(block: IndexRange, shards: Sequence[tuple[IndexRange, torch.Tensor]]) -> torch.Tensor:
    """Assemble a block from the shards that cover it."""
    first = shards[0][1]
    assembled_values = torch.empty(block.shape, dtype=first.dtype, device=first.device)
    for held, values in shards:
        shared = held.intersection(block)
        if shared is not None:
            assembled_values[shared.slices_in(block)] = values[shared.slices_in(held)]
    return assembled_values


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a tensor in memory of their own.

    Attributes:
        first: index of the first row; None for a full tensor.
    """

    name: str
    first: int | None
    values: torch.Tensor


@dataclass(frozen=True)
class _SentParam:
    """A parameter, or the ``part``-th of ``parts`` of each rank's shard of it, and the dtype in which it is sent."""

    name: str
    param: torch.Tensor
    dtype: torch.dtype
    part: int = 0
    parts: int = 1

    @property
    def nbytes(self) -> int:
        return self.param.numel() * self.dtype.itemsize // self.parts

    def block(self, held: IndexRange) -> IndexRange:
        """Return the part of a shard that is sent."""
        if self.parts == 1:
            return held
        return held.with_dim(0, *chunk_range(held.low[0], held.high[0], self.parts, self.part))


@dataclass(frozen=True)
class _ShardPart:
    """The part of a parameter that one rank sends, and its position in that rank's flat buffer.

    Args:
        inside: its index inside the rank's shard.
    """

    block: IndexRange
    inside: tuple[slice, ...]
    offset: int
    nbytes: int


class _Group:
    """Parameters that are gathered together, and the layout of each rank's flat buffer."""

    def __init__(self, members: Sequence[_SentParam], meshes: Meshes):
        self.members = members
        self.layouts = [_layout(members, meshes, rank) for rank in range(meshes.topology.fsdp)]
        # Every rank sends equally many bytes, as all_gather_into_tensor requires.
        self.rank_bytes = max(pieces[-1][-1].offset + _aligned(pieces[-1][-1].nbytes) for pieces in self.layouts)


def assemble(tensors: Iterable[GatheredTensor], traffic: Traffic, max_gather_bytes: int) -> Iterator[Rows]:
    """Yield gathered tensors in memory of their own; ``traffic`` counts the memory that is held.

    Parts come a quarter of a gather at a time: converters copy, and the last copy may be held while the next is made.
    """
    for tensor in tensors:
        for rows in tensor.assemble(max_gather_bytes // 4):
            traffic.hold(rows.values.nbytes)
            yield rows
            traffic.release(rows.values.nbytes)


def gather(
    model: nn.Module,
    meshes: Meshes,
    layers: Sequence[str],
    max_gather_bytes: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
    traffic: Traffic | None = None,
    may_split: Callable[[str], bool] = lambda name: False,
    adapters: AdapterUse = "merged",
    values: LocalValues | None = None,
) -> Generator[GatheredTensor, None, None]:
    """Gather every parameter and persistent buffer of the model to every rank, in the model's order; collective.

    A tied parameter is gathered once. Every rank starts every gather, even if its consumer stops early: closing the
    iterator receives and drops the rest.

    Args:
        layers: FQNs of the layers; the parameters of a layer are gathered together.
        max_gather_bytes: bound of one gather (``gather_bytes``); two are in flight at a time. A larger layer is
            gathered in several steps, a larger tensor by itself.
        dtypes: the dtype in which each parameter is sent if it is narrower than the stored one; the cast precedes the
            gather, which then moves fewer bytes.
        traffic: counts the bytes that the gathers send, receive and hold.
        may_split: tells by name whether a parameter that is too large for one gather may be gathered in parts, each of
            at least one row of every rank's shard.
        adapters: whether low-rank adapters are merged into the weights that they adapt, left out, or gathered alone.
        values: returns the values to send for a tensor; by default its local shard, with its adapters merged.
    """
    traffic = traffic or Traffic()
    device, ranks = torch.device(meshes.dense.device_type), meshes.topology.fsdp
    members = [
        part
        for name, param in (adapter_weights(model) if adapters == "alone" else weights(model))
        for part in _parts(
            _SentParam(name, param.detach(), narrower(param.dtype, (dtypes or {}).get(name))),
            meshes,
            max_gather_bytes,
            may_split,
        )
    ]
    groups = [_Group(group, meshes) for group in _groups(members, layers, max_gather_bytes)]
    max_rank_bytes = max((group.rank_bytes for group in groups), default=0)
    buffers = [torch.empty((ranks + 1) * max_rank_bytes, dtype=torch.uint8, device=device) for _ in groups[:2]]
    traffic.hold(sum(buffer.nbytes for buffer in buffers))
    started, values = 0, values or local_values(model, device, adapters)

    def start() -> tuple[_Group, torch.Tensor, dist.Work] | None:
        """Start the next gather; return None after the last."""
        nonlocal started
        if started == len(groups):
            return None
        group, buffer = groups[started], buffers[started % 2]
        own, everyone = buffer[: group.rank_bytes], buffer[max_rank_bytes : max_rank_bytes + ranks * group.rank_bytes]
        for sent, pieces in zip(group.members, group.layouts[meshes.fsdp_rank], strict=True):
            local = values(sent.name, sent.param)  # also of an empty shard: merging an adapter is collective
            for piece in pieces:
                if piece.nbytes:
                    shard = own[piece.offset : piece.offset + piece.nbytes].view(sent.dtype)
                    shard.view(piece.block.shape).copy_(local[piece.inside])
        traffic.sent += everyone.numel() - own.numel()
        traffic.received += everyone.numel() - own.numel()
        work = dist.all_gather_into_tensor(everyone, own, group=meshes.replica_group, async_op=True)
        assert work is not None
        started += 1
        return group, everyone, work

    pending = start()
    try:
        while pending is not None:
            group, everyone, work = pending
            pending = start()
            work.wait()
            for i, sent in enumerate(group.members):
                yield GatheredTensor(sent.name, sent.param.shape, list(_shards(group, i, everyone)), sent.parts == 1)
        for name, buffer in persistent_buffers(model).items() if adapters != "alone" else ():
            yield GatheredTensor(name, buffer.shape, [(IndexRange.of(buffer.shape), buffer.detach().to(device))])
    finally:
        while pending is not None:
            pending[2].wait()
            pending = start()
        traffic.release(sum(buffer.nbytes for buffer in buffers))


def gather_bytes(max_bytes: int, ranks: int, is_assembled: bool = False) -> int:
    """Return the bytes that one gather may have so that a rank holds no more than ``max_bytes``.

    There are two buffers, each with the rank's own part besides. With ``is_assembled`` there is room for tensors that
    are copied out of them, for a second copy in a checkpoint's layout, and for gloo's own copy of a gather.
    """
    return max_bytes * ranks // (2 * (ranks + 1) + (3 * ranks if is_assembled else 0))


def narrower(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return ``wanted`` if it is narrower than ``stored``, else ``stored``."""
    return wanted if wanted is not None and wanted.itemsize < stored.itemsize else stored


def _parts(
    whole: _SentParam, meshes: Meshes, max_gather_bytes: int, may_split: Callable[[str], bool]
) -> Iterator[_SentParam]:
    """Yield a parameter as it is, or divided into as few parts as fit a gather each."""
    if whole.nbytes <= max_gather_bytes or not may_split(whole.name):
        yield whole
        return
    # The first rank has the most rows.
    held = shard_ranges(whole.param.shape, shard_steps(whole.param), meshes.topology.coordinate(0))
    rows = held[0].shape[0]
    parts = -(-rows // max(1, rows * max_gather_bytes // whole.nbytes))
    for part in range(parts):
        yield replace(whole, part=part, parts=parts)


def _groups(members: Iterable[_SentParam], layers: Sequence[str], max_gather_bytes: int) -> Iterator[list[_SentParam]]:
    group: list[_SentParam] = []
    group_bytes, group_layer = 0, None
    for sent in members:
        layer = next((fqn for fqn in layers if sent.name.startswith(fqn + ".")), None)
        if group and (layer != group_layer or group_bytes + sent.nbytes > max_gather_bytes):
            yield group
            group, group_bytes = [], 0
        group.append(sent)
        group_bytes, group_layer = group_bytes + sent.nbytes, layer
    if group:
        yield group


def _shards(group: _Group, index: int, everyone: torch.Tensor) -> Iterator[tuple[IndexRange, torch.Tensor]]:
    """Yield each rank's shard of a group's ``index``-th parameter as a view of the gathered bytes."""
    dtype = group.members[index].dtype
    for rank, members in enumerate(group.layouts):
        for piece in members[index]:
            if piece.nbytes:
                start = rank * group.rank_bytes + piece.offset
                yield piece.block, everyone[start : start + piece.nbytes].view(dtype).view(piece.block.shape)


def _layout(group: Sequence[_SentParam], meshes: Meshes, rank: int) -> list[list[_ShardPart]]:
    """Lay out the parts of each parameter in a rank's flat buffer, one for each range that the rank holds of it."""
    members: list[list[_ShardPart]] = []
    offset = 0
    for sent in group:
        cuts, pieces = shard_steps(sent.param), []
        ranges = shard_ranges(sent.param.shape, cuts, meshes.topology.coordinate(rank))
        for held in ranges:
            block = sent.block(held)
            # Rank 0 alone sends what is replicated.
            nbytes = sent.dtype.itemsize * block.numel if cuts or rank == 0 else 0
            pieces.append(_ShardPart(block, slices_in_shard(block, ranges), offset, nbytes))
            offset += _aligned(nbytes)
        members.append(pieces)
    return members


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
