"""Full tensors out of sharded parameters, a layer at a time.

Every parameter, dense or expert, is cut over exactly the ranks of one replica (``engine/topology/mesh.py``). So one
all-gather of bytes brings all shards of a whole layer, where a gather per tensor would need two for each expert
weight. The next gather is under way while one is taken.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from ...engine.lora.merge import local_values, weights
from ...engine.topology.dtensor import persistent_buffers, shard_steps
from ...engine.topology.index_ranges import IndexRange, chunk_range, shard_range
from ...engine.topology.mesh import Meshes
from .report import Traffic

__all__ = ["Gathered", "Rows", "assembled", "full_tensors", "gather_bytes", "gathered", "narrower"]

_ALIGNMENT = 16  # bytes; enough to view the flat buffer as any dtype


@dataclass(frozen=True)
class Gathered:
    """A tensor in its shards, which lie in a buffer that is used again: the caller's until it asks for the next.

    Attributes:
        is_whole: False for a part of each shard, some of its rows.
    """

    name: str
    shape: torch.Size
    shards: list[tuple[IndexRange, torch.Tensor]]
    is_whole: bool = True

    def assembled(self, max_bytes: int) -> Iterator["Rows"]:
        """The tensor whole; of a part, rows that ranks with the same experts hold, ``max_bytes`` of them at a time."""
        box = IndexRange.of(self.shape)
        if self.is_whole:
            yield Rows(self.name, None, _joined(box, self.shards))
            return
        runs: dict[tuple[int, int], list[tuple[IndexRange, torch.Tensor]]] = {}
        for held, values in self.shards:
            runs.setdefault((held.low[0], held.high[0]), []).append((held, values))
        itemsize = self.shards[0][1].itemsize
        count = max(1, max_bytes // (self.shape[1:].numel() * itemsize))
        for (low, high), shards in runs.items():
            for first in range(low, high, count):
                yield Rows(self.name, first, _joined(box.with_dim(0, first, min(first + count, high)), shards))


def _joined(box: IndexRange, shards: Sequence[tuple[IndexRange, torch.Tensor]]) -> torch.Tensor:
    """The values of a box that the shards cover."""
    first = shards[0][1]
    joined = torch.empty(box.shape, dtype=first.dtype, device=first.device)
    for held, values in shards:
        shared = held.intersection(box)
        if shared is not None:
            joined[shared.slices_in(box)] = values[shared.slices_in(held)]
    return joined


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows of a tensor, the caller's own.

    Attributes:
        first: index of the first row; None for a tensor that is whole.
    """

    name: str
    first: int | None
    values: torch.Tensor


@dataclass(frozen=True)
class _Sent:
    """A parameter, or of each rank's shard the ``part``-th of ``parts``, and the dtype in which it is sent."""

    name: str
    param: torch.Tensor
    dtype: torch.dtype
    part: int = 0
    parts: int = 1

    @property
    def nbytes(self) -> int:
        return self.param.numel() * self.dtype.itemsize // self.parts

    def box(self, held: IndexRange) -> IndexRange:
        """What is sent of a shard."""
        if self.parts == 1:
            return held
        return held.with_dim(0, *chunk_range(held.low[0], held.high[0], self.parts, self.part))


@dataclass(frozen=True)
class _Piece:
    """What one rank sends of one parameter, and where it lies inside that rank's flat buffer.

    Args:
        inside: where it is in the rank's shard.
    """

    box: IndexRange
    inside: tuple[slice, ...]
    offset: int
    nbytes: int


class _Group:
    """Parameters that are gathered together, and where each rank's shards lie in what it sends."""

    def __init__(self, members: Sequence[_Sent], meshes: Meshes):
        self.members = members
        self.layouts = [_layout(members, meshes, rank) for rank in range(meshes.topology.fsdp)]
        # Bytes that a rank sends.
        self.slot = max(pieces[-1].offset + _aligned(pieces[-1].nbytes) for pieces in self.layouts)


def full_tensors(
    model: nn.Module,
    meshes: Meshes,
    layers: Sequence[str],
    max_bytes: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
    traffic: Traffic | None = None,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield ``(name, tensor)`` of what ``gathered`` brings; each tensor is whole and the caller's own."""
    traffic = traffic or Traffic()
    limit = gather_bytes(max_bytes, meshes.topology.fsdp, is_assembled=True)
    arriving = gathered(model, meshes, layers, limit, dtypes, traffic)
    with contextlib.closing(arriving):
        for whole in assembled(arriving, traffic, limit):
            yield whole.name, whole.values


def assembled(arriving: Iterable[Gathered], traffic: Traffic, max_gather_bytes: int) -> Iterator[Rows]:
    """What comes, put together; ``traffic`` counts what is held.

    Of parts a quarter of a gather at a time: converters copy, and the last one's may be held while the next are made.
    """
    for tensor in arriving:
        for rows in tensor.assembled(max_gather_bytes // 4):
            traffic.hold(rows.values.nbytes)
            yield rows
            traffic.release(rows.values.nbytes)


def gathered(
    model: nn.Module,
    meshes: Meshes,
    layers: Sequence[str],
    max_gather_bytes: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
    traffic: Traffic | None = None,
    may_split: Callable[[str], bool] = lambda name: False,
) -> Generator[Gathered, None, None]:
    """Bring every parameter and persistent buffer of the model to every rank, in the model's order; collective.

    A tied parameter comes once; adapters are merged into the weights that they adapt. Every gather is issued on every
    rank, also where the consumer stops early: what is left is then received and dropped when the iterator is closed.

    Args:
        layers: FQNs of the layers; the parameters of one are gathered together.
        max_gather_bytes: of one gather (``gather_bytes``); one is taken while another is under way. A layer beyond
            that is gathered in several, a larger tensor alone.
        dtypes: parameters are sent in these, where they are narrower than what they are stored in: cast before the
            gather, which then moves fewer bytes.
        traffic: counts what the gathers move and hold.
        may_split: tells of a parameter that is too large for one gather whether it may come in parts: each is some
            rows of every rank's shard, at least one.
    """
    traffic = traffic or Traffic()
    device, ranks = torch.device(meshes.dense.device_type), meshes.topology.fsdp
    members = [
        part
        for name, param in weights(model)
        for part in _parts(
            _Sent(name, param.detach(), narrower(param.dtype, (dtypes or {}).get(name))),
            meshes,
            max_gather_bytes,
            may_split,
        )
    ]
    groups = [_Group(group, meshes) for group in _groups(members, layers, max_gather_bytes)]
    slot = max((group.slot for group in groups), default=0)
    buffers = [torch.empty((ranks + 1) * slot, dtype=torch.uint8, device=device) for _ in groups[:2]]
    traffic.hold(sum(buffer.nbytes for buffer in buffers))
    issued, values = 0, local_values(model, device)

    def start() -> tuple[_Group, torch.Tensor, dist.Work] | None:
        """Issue the next gather; None after the last."""
        nonlocal issued
        if issued == len(groups):
            return None
        group, buffer = groups[issued], buffers[issued % 2]
        mine, everyone = buffer[: group.slot], buffer[slot : slot + ranks * group.slot]
        for sent, piece in zip(group.members, group.layouts[meshes.fsdp_rank], strict=True):
            if piece.nbytes:
                shard = mine[piece.offset : piece.offset + piece.nbytes].view(sent.dtype)
                shard.view(piece.box.shape).copy_(values(sent.name, sent.param)[piece.inside])
        # Each shard goes to all other ranks, and all of theirs come.
        traffic.sent += everyone.numel() - mine.numel()
        traffic.received += everyone.numel() - mine.numel()
        work = dist.all_gather_into_tensor(everyone, mine, group=meshes.replica_group, async_op=True)
        assert work is not None
        issued += 1
        return group, everyone, work

    coming = start()
    try:
        while coming is not None:
            group, everyone, work = coming
            coming = start()
            work.wait()
            for i, sent in enumerate(group.members):
                yield Gathered(sent.name, sent.param.shape, list(_shards(group, i, everyone)), sent.parts == 1)
        for name, buffer in persistent_buffers(model).items():
            yield Gathered(name, buffer.shape, [(IndexRange.of(buffer.shape), buffer.detach().to(device))])
    finally:
        while coming is not None:
            coming[2].wait()
            coming = start()
        traffic.release(sum(buffer.nbytes for buffer in buffers))


def gather_bytes(max_bytes: int, ranks: int, is_assembled: bool = False) -> int:
    """What is brought together at once, so that no more than ``max_bytes`` are held.

    There are two buffers, with a rank's own part of it beside. ``is_assembled``, it is copied out of them too, and may
    be once more into the layout of a checkpoint; and there is room for what gloo holds of a gather under way.
    """
    return max_bytes * ranks // (2 * (ranks + 1) + (3 * ranks if is_assembled else 0))


def narrower(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """``wanted``, if it takes fewer bytes than what is stored."""
    return wanted if wanted is not None and wanted.itemsize < stored.itemsize else stored


def _parts(whole: _Sent, meshes: Meshes, max_gather_bytes: int, may_split: Callable[[str], bool]) -> Iterator[_Sent]:
    """A parameter as one, or in as many parts as it takes for each to fit."""
    if whole.nbytes <= max_gather_bytes or not may_split(whole.name):
        yield whole
        return
    # The first rank has the most rows.
    rows = shard_range(whole.param.shape, shard_steps(whole.param), meshes.topology.coordinate(0)).shape[0]
    parts = -(-rows // max(1, rows * max_gather_bytes // whole.nbytes))
    for part in range(parts):
        yield replace(whole, part=part, parts=parts)


def _groups(members: Iterable[_Sent], layers: Sequence[str], max_gather_bytes: int) -> Iterator[list[_Sent]]:
    group: list[_Sent] = []
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
    """Each shard of a group's ``index``-th parameter, in what was gathered."""
    dtype = group.members[index].dtype
    for rank, pieces in enumerate(group.layouts):
        piece = pieces[index]
        if piece.nbytes:
            start = rank * group.slot + piece.offset
            yield piece.box, everyone[start : start + piece.nbytes].view(dtype).view(piece.box.shape)


def _layout(group: Sequence[_Sent], meshes: Meshes, rank: int) -> list[_Piece]:
    pieces, offset = [], 0
    for sent in group:
        cuts = shard_steps(sent.param)
        held = shard_range(sent.param.shape, cuts, meshes.topology.coordinate(rank))
        box = sent.box(held)
        # What every rank holds whole comes from the first.
        nbytes = sent.dtype.itemsize * box.numel if cuts or rank == 0 else 0
        pieces.append(_Piece(box, box.slices_in(held), offset, nbytes))
        offset += _aligned(nbytes)
    return pieces


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
