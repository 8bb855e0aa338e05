"""Full tensors out of sharded parameters, a layer at a time.

Every parameter, dense or expert, is cut over exactly the ranks of one replica (``engine/mesh.py``). So one all-gather
of bytes brings all shards of a whole layer, where a gather per tensor would need two for each expert weight. The next
gather is under way while one is taken.
"""

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..engine.boxes import Box, cut_box
from ..engine.mesh import Meshes
from ..engine.shards import cuts_of, local_tensor, persistent_buffers
from .traffic import Traffic

__all__ = ["Gathered", "assembled", "full_tensors", "gather_bytes", "gathered", "narrower"]

_ALIGNMENT = 16  # bytes; enough to view the flat buffer as any dtype


@dataclass(frozen=True)
class Gathered:
    """A tensor in its shards, which lie in a buffer that is used again: the caller's until it asks for the next."""

    name: str
    shape: torch.Size
    shards: list[tuple[Box, torch.Tensor]]

    def assembled(self) -> torch.Tensor:
        """The tensor whole, the caller's own."""
        first = self.shards[0][1]
        full = torch.empty(self.shape, dtype=first.dtype, device=first.device)
        for box, values in self.shards:
            full[box.slices] = values
        return full


@dataclass(frozen=True)
class _Sent:
    """A parameter, and the dtype in which it is sent."""

    name: str
    param: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.param.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Piece:
    """One rank's shard of one parameter inside that rank's flat buffer."""

    box: Box
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
    arriving = gathered(model, meshes, layers, max_bytes, dtypes, traffic)
    with contextlib.closing(arriving):
        yield from assembled(arriving, traffic)


def assembled(arriving: Iterable[Gathered], traffic: Traffic) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor whole, under its name; ``traffic`` counts what is held."""
    for tensor in arriving:
        whole = tensor.assembled()
        traffic.hold(whole.nbytes)
        yield tensor.name, whole
        traffic.release(whole.nbytes)


def gathered(
    model: nn.Module,
    meshes: Meshes,
    layers: Sequence[str],
    max_bytes: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
    traffic: Traffic | None = None,
) -> Generator[Gathered, None, None]:
    """Bring every parameter and persistent buffer of the model to every rank, in the model's order; collective.

    A tied parameter comes once. Every gather is issued on every rank, also where the consumer stops early: what is left
    is then received and dropped when the iterator is closed.

    Args:
        layers: FQNs of the layers; the parameters of one are gathered together.
        max_bytes: bound of the buffers of two gathers, one that is taken and one that is under way. A layer beyond
            that is gathered in several, a larger tensor alone.
        dtypes: parameters are sent in these, where they are narrower than what they are stored in: cast before the
            gather, which then moves fewer bytes.
        traffic: counts what the gathers move and hold.
    """
    traffic = traffic or Traffic()
    device, ranks = torch.device(meshes.dense.device_type), meshes.topology.fsdp
    limit = gather_bytes(max_bytes, ranks)
    groups = [_Group(members, meshes) for members in _groups(model, layers, limit, dtypes or {})]
    slot = max((group.slot for group in groups), default=0)
    buffers = [torch.empty((ranks + 1) * slot, dtype=torch.uint8, device=device) for _ in groups[:2]]
    traffic.hold(sum(buffer.nbytes for buffer in buffers))
    issued = 0

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
                shard.view(piece.box.shape).copy_(local_tensor(sent.param))
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
                yield Gathered(sent.name, sent.param.shape, list(_shards(group, i, everyone)))
        for name, buffer in persistent_buffers(model).items():
            yield Gathered(name, buffer.shape, [(Box.of(buffer.shape), buffer.detach().to(device))])
    finally:
        while coming is not None:
            coming[2].wait()
            coming = start()
        traffic.release(sum(buffer.nbytes for buffer in buffers))


def gather_bytes(max_bytes: int, ranks: int) -> int:
    """What is brought together at once, of two buffers that hold it and a rank's own part of it."""
    return max_bytes * ranks // (2 * (ranks + 1))


def narrower(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """``wanted``, if it takes fewer bytes than what is stored."""
    return wanted if wanted is not None and wanted.itemsize < stored.itemsize else stored


def _groups(
    model: nn.Module, layers: Sequence[str], max_gather_bytes: int, dtypes: Mapping[str, torch.dtype]
) -> Iterator[list[_Sent]]:
    group: list[_Sent] = []
    group_bytes, group_layer = 0, None
    for name, param in model.named_parameters():
        layer = next((fqn for fqn in layers if name.startswith(fqn + ".")), None)
        sent = _Sent(name, param.detach(), narrower(param.dtype, dtypes.get(name)))
        if group and (layer != group_layer or group_bytes + sent.nbytes > max_gather_bytes):
            yield group
            group, group_bytes = [], 0
        group.append(sent)
        group_bytes, group_layer = group_bytes + sent.nbytes, layer
    if group:
        yield group


def _shards(group: _Group, index: int, everyone: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
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
        cuts = cuts_of(sent.param)
        box = cut_box(sent.param.shape, cuts, meshes.topology.coordinate(rank))
        # What every rank holds whole comes from the first.
        nbytes = sent.dtype.itemsize * box.numel if cuts or rank == 0 else 0
        pieces.append(_Piece(box, offset, nbytes))
        offset += _aligned(nbytes)
    return pieces


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
