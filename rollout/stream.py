"""Full tensors out of sharded parameters, a layer at a time.

Every parameter, dense or expert, is cut over exactly the ranks of one replica (``engine/mesh.py``). So one all-gather
of bytes brings all shards of a whole layer, where a gather per tensor would need two for each expert weight.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..engine.mesh import Meshes
from ..engine.shards import box_of, local_tensor, persistent_buffers

__all__ = ["full_tensors", "narrower"]

_ALIGNMENT = 16  # bytes; enough to view the flat buffer as any dtype


@dataclass(frozen=True)
class _Piece:
    """One rank's shard of one parameter inside that rank's flat buffer."""

    box: tuple[slice, ...]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Sent:
    """A parameter, and the dtype in which it is sent."""

    name: str
    param: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.param.numel() * self.dtype.itemsize


def full_tensors(
    model: nn.Module,
    meshes: Meshes,
    layers: Sequence[str],
    max_gather_bytes: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and persistent buffer of the model whole, on every rank, in the model's order.

    All ranks have to consume it to its end, in step: it holds collectives. A tied parameter comes once. Each yielded
    tensor is the caller's own.

    Args:
        layers: FQNs of the layers; the parameters of one are gathered together.
        max_gather_bytes: bound of one gather; a layer beyond it is gathered in several, a larger tensor alone. Beside
            a gather's shards a rank holds the tensor it has just yielded and the one it assembles.
        dtypes: parameters are sent in these, where they are narrower than what they are stored in: cast before the
            gather, which then moves fewer bytes.
    """
    group: list[_Sent] = []
    group_bytes, group_layer = 0, None
    for name, param in model.named_parameters():
        layer = next((fqn for fqn in layers if name.startswith(fqn + ".")), None)
        sent = _Sent(name, param.detach(), narrower(param.dtype, (dtypes or {}).get(name)))
        if group and (layer != group_layer or group_bytes + sent.nbytes > max_gather_bytes):
            yield from _gather(group, meshes)
            group, group_bytes = [], 0
        group.append(sent)
        group_bytes, group_layer = group_bytes + sent.nbytes, layer
    yield from _gather(group, meshes)
    for name, buffer in persistent_buffers(model).items():
        yield name, buffer.detach().clone()


def narrower(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """``wanted``, if it takes fewer bytes than what is stored."""
    return wanted if wanted is not None and wanted.itemsize < stored.itemsize else stored


def _gather(group: Sequence[_Sent], meshes: Meshes) -> Iterator[tuple[str, torch.Tensor]]:
    """One all-gather for all parameters of ``group``, then one assembled tensor at a time."""
    if not group:
        return
    device = torch.device(meshes.dense.device_type)
    ranks = meshes.topology.fsdp
    layouts = [_layout(group, meshes, rank) for rank in range(ranks)]
    slot = max(pieces[-1].offset + _aligned(pieces[-1].nbytes) for pieces in layouts)

    mine = torch.empty(slot, dtype=torch.uint8, device=device)
    for sent, piece in zip(group, layouts[meshes.fsdp_rank], strict=True):
        if piece.nbytes:
            local = local_tensor(sent.param).to(device, sent.dtype).contiguous()
            mine[piece.offset : piece.offset + piece.nbytes] = local.view(-1).view(torch.uint8)
    everyone = torch.empty(ranks * slot, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(everyone, mine, group=meshes.replica_group)
    del mine

    for i, sent in enumerate(group):
        full = torch.empty(sent.param.shape, dtype=sent.dtype, device=device)
        for rank, pieces in enumerate(layouts):
            piece = pieces[i]
            if piece.nbytes:
                start = rank * slot + piece.offset
                full[piece.box] = everyone[start : start + piece.nbytes].view(sent.dtype).view(piece.shape)
        yield sent.name, full


def _layout(group: Sequence[_Sent], meshes: Meshes, rank: int) -> list[_Piece]:
    pieces, offset = [], 0
    for sent in group:
        box = box_of(sent.param, meshes.topology, rank)
        shape = tuple(s.stop - s.start for s in box)
        nbytes = sent.dtype.itemsize * torch.Size(shape).numel()
        pieces.append(_Piece(box, shape, offset, nbytes))
        offset += _aligned(nbytes)
    return pieces


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
