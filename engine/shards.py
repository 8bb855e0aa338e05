"""Which box of a parameter each rank holds: one rule for loading, for the gradient norm and for export.

FSDP2 cuts like ``torch.chunk``: equal pieces of ``ceil(n / parts)``, the last ones shorter or empty.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from .mesh import Topology

__all__ = ["Cut", "box_of", "chunk_range", "cuts_of", "is_expert_parameter", "local_tensor", "persistent_buffers"]


@dataclass(frozen=True)
class Cut:
    """One step of sharding: ``dim`` cut over the mesh axis ``axis`` in ``parts`` pieces."""

    dim: int
    axis: str
    parts: int


def chunk_range(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """The ``index``-th of ``parts`` pieces of ``[start, stop)``, as ``torch.chunk`` cuts it."""
    piece = -(-(stop - start) // parts)
    return min(start + index * piece, stop), min(start + (index + 1) * piece, stop)


def cuts_of(param: torch.Tensor) -> tuple[Cut, ...]:
    """The cuts of a parameter, outermost first; empty for a plain tensor.

    On dim 0 of an expert weight both ``ep`` and ``ep_fsdp`` may cut. DTensor lists its axes in mesh order and marks
    the one that was applied to an already cut dim as strided, so the plain cuts come first.
    """
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    names = mesh.mesh_dim_names
    assert names is not None, "our meshes have named axes"
    sharded = [
        (type(placement) is not Shard, Cut(placement.dim, names[axis], mesh.size(axis)))  # type: ignore[attr-defined]
        for axis, placement in enumerate(param.placements)
        if placement.is_shard() or hasattr(placement, "split_factor")
    ]
    return tuple(cut for _, cut in sorted(sharded, key=lambda entry: entry[0]))


def box_of(param: torch.Tensor, topology: Topology, fsdp_rank: int) -> tuple[slice, ...]:
    """The slice per dim of ``param`` that the ``fsdp_rank``-th rank of a replica holds."""
    coordinate = topology.coordinate(fsdp_rank)
    box = [(0, size) for size in param.shape]
    for cut in cuts_of(param):
        box[cut.dim] = chunk_range(*box[cut.dim], cut.parts, coordinate[cut.axis])
    return tuple(slice(*bounds) for bounds in box)


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """This rank's shard, without padding; the tensor itself if it is not sharded."""
    return param.to_local() if isinstance(param, DTensor) else param


def is_expert_parameter(param: torch.Tensor) -> bool:
    """Whether the parameter lives on the experts' mesh."""
    names = param.device_mesh.mesh_dim_names if isinstance(param, DTensor) else None
    return names is not None and "ep" in names


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to a checkpoint, by name."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}
