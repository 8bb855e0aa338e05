"""The elements of a parameter on each rank: one rule for loading, the gradient norm, export and weight syncs."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .index_ranges import IndexRange, ShardStep, shard_ranges, slices_in_shard

__all__ = [
    "checkpoint_tensors",
    "shard_steps",
    "is_adapter",
    "is_expert_parameter",
    "is_first_holder",
    "local_pieces",
    "local_ranges",
    "local_tensor",
    "persistent_buffers",
]


def shard_steps(param: torch.Tensor) -> tuple[ShardStep, ...]:
    """Return the steps by which a parameter is sharded, outermost first; empty for a plain tensor.

    DTensor lists axes in mesh order. A shard of an already sharded dim (``ep``, then ``ep_fsdp``) is strided. It
    has the number of parts of the later axes, so plain shards come first here. A strided shard with more parts has a
    ``split_factor``: gate and up, each sharded over ``etp``.
    """
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or ()
    found: list[tuple[bool, ShardStep]] = []
    made: dict[int, int] = {}  # dim -> parts of the axes after this one
    for axis in reversed(range(mesh.ndim)):
        placement: Any = param.placements[axis]
        factor = getattr(placement, "split_factor", 1)
        if not placement.is_shard() and factor == 1:
            continue
        inside = made.get(placement.dim, 1)
        comes_later = factor == inside > 1
        step = ShardStep(placement.dim, names[axis], mesh.size(axis), 1 if comes_later else factor)
        found.insert(0, (comes_later, step))
        made[placement.dim] = inside * mesh.size(axis)
    return tuple(step for _, step in sorted(found, key=lambda entry: entry[0]))


def local_ranges(param: torch.Tensor, at: Mapping[str, int] | None = None) -> tuple[IndexRange, ...]:
    """Return the ranges of ``param`` on this rank, or on the rank with index ``at`` on some axes."""
    if not isinstance(param, DTensor):
        return (IndexRange.of(param.shape),)
    steps = shard_steps(param)
    here = {step.axis: param.device_mesh.get_local_rank(step.axis) for step in steps}
    return shard_ranges(param.shape, steps, {**here, **(at or {})})


def local_pieces(param: torch.Tensor) -> Iterator[tuple[IndexRange, torch.Tensor]]:
    """Yield this rank's ranges, each with its values, a view of the local shard."""
    local, ranges = local_tensor(param), local_ranges(param)
    for held in ranges:
        yield held, local if len(ranges) == 1 else local[slices_in_shard(held, ranges)]


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, without padding, or the tensor itself if it is not sharded."""
    return param.to_local() if isinstance(param, DTensor) else param


def is_expert_parameter(param: torch.Tensor) -> bool:
    """Return whether a parameter is on the experts' mesh."""
    names = param.device_mesh.mesh_dim_names if isinstance(param, DTensor) else None
    return names is not None and "ep" in names


def is_first_holder(tensor: torch.Tensor, position: int, replica: int | None = None) -> bool:
    """Return whether this rank is the first with its shard, in the given ``replica``, by default in its own.

    ``position`` is the rank's among the ranks that hold unsharded tensors.
    """
    if not isinstance(tensor, DTensor):
        return position == 0
    mesh, sharded = tensor.device_mesh, {step.axis for step in shard_steps(tensor)}
    first = {axis: 0 for axis in mesh.mesh_dim_names or () if axis not in sharded}
    if "dp_replicate" in first:
        del first["dp_replicate"]
        if replica is not None:
            first["dp_replicate"] = replica % mesh["dp_replicate"].size()
    return all(mesh.get_local_rank(axis) == at for axis, at in first.items())


def is_adapter(name: str) -> bool:
    """Return whether a parameter is an adapter's, or trained whole beside frozen ones (``lora/adapters.py``)."""
    return name.endswith(("_lora_A", "_lora_B", "_lora_magnitude", "_lora_saved"))


def checkpoint_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name, the tensors of a checkpoint."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a checkpoint, by name."""
    # Not by state_dict(): FSDP2's pre-hook of it reshards modules, which would break a running forward.
    found = {}
    for name, buffer in model.named_buffers():
        owner, _, own = name.rpartition(".")
        if own not in model.get_submodule(owner)._non_persistent_buffers_set:
            found[name] = buffer
    return found
