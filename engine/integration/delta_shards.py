"""Exports this rank's shards under checkpoint names, for verl's ``delta_sharded`` backend.

The backend sends only the elements that a step has changed (verl 0.9.1, ``workers/engine/utils.py``,
``hf_delta_export``). Each rank compares its shards with the last sync's and sends the changes to rank 0, by name and
position in the checkpoint. A checkpoint stores a stack of experts as one or more matrices per expert. Converting
indices with transformers' converter locates each element in them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from verl.workers.engine.spec import BlockPlacement, ShardSpec, translate_flat_indices

from ..lora.merge import local_values
from ..model import hf_names
from ..model.layers import is_mtp
from ..topology.dtensor import checkpoint_tensors, is_adapter, local_ranges, shard_steps
from ..topology.mesh import Meshes

__all__ = ["ExpertsSpec", "ShardExport", "experts_entry"]


@dataclass(frozen=True)
class _ExpertLayout:
    """The matrices in which a checkpoint stores one expert (one row) of a stack.

    Args:
        slots: names and shapes of the matrices of expert 0.
        slot_of: for each element of a row, the index of its matrix in ``slots``.
        position: for each element of a row, its flat position in that matrix, int32.
    """

    slots: tuple[tuple[str, tuple[int, ...]], ...]
    slot_of: torch.Tensor
    position: torch.Tensor


@dataclass
class ExpertsSpec(ShardSpec):
    """verl's description of a shard, with the layout of its stack for ``experts_entry``."""

    rows: _ExpertLayout | None = field(default=None, repr=False)


class ShardExport:
    """Exports an engine's shards for delta syncs; keeps the checkpoint layout of each stack.

    Args:
        dtype: dtype of floating-point values, bfloat16 as in verl's first sync, which later syncs compare with.
    """

    def __init__(self, model: nn.Module, meshes: Meshes, dtype: torch.dtype = torch.bfloat16):
        self.model: Any = model
        self.meshes, self.dtype = meshes, dtype
        self._layouts: dict[str, tuple[str, _ExpertLayout | None]] = {}

    def shards(self) -> Iterator[tuple[str, torch.Tensor, ShardSpec]]:
        """Yield ``(name, values, spec)`` of the policy's parameters and persistent buffers, in one order on all ranks.

        Names are the checkpoint's. A stack of experts has the model's name, and ``spec.hf_slots`` has the names of its
        matrices. Values are this rank's flattened shard with its adapter merged. A tied parameter is yielded once.

        Raises:
            ValueError: the checkpoint stores a tensor in another form, and it is not a stack of experts.
        """
        device = self.meshes.dense.device_type
        named = checkpoint_tensors(self.model).items()
        tensors = {name: t for name, t in named if not (is_adapter(name) or is_mtp(self.model, name))}
        local = local_values(self.model, device)
        for name, tensor in tensors.items():
            values = local(name, tensor).to(device)
            if values.is_floating_point():
                values = values.to(self.dtype)
            if name not in self._layouts:
                self._layouts[name] = self._layout(name, tensor)
            own, rows = self._layouts[name]
            yield own, values.reshape(-1), self._spec(name, tensor, rows)

    def _spec(self, name: str, tensor: torch.Tensor, rows: _ExpertLayout | None) -> ShardSpec:
        (block,), shape = local_ranges(tensor), tuple(tensor.shape)
        if not shard_steps(tensor):
            return ShardSpec(full_shape=shape)  # replicated; verl sends rank 0's
        placed: dict[str, Any] = {
            "full_shape": shape,
            "place": BlockPlacement(block.shape, block.low, shape),
            "gather_group": self.meshes.replica_group,
            # Other replicas hold the same values.
            "contributes": self.meshes.dense.get_local_rank("dp_replicate") == 0,
        }
        if rows is None:
            return ShardSpec(**placed)
        slots = [
            (hf_names.shift_expert_index(slot, expert), size) for expert in range(shape[0]) for slot, size in rows.slots
        ]
        return ExpertsSpec(**placed, hf_slots=slots, to_hf_chunk=partial(self._chunk, name), rows=rows)

    def _chunk(self, name: str, start: int, segment: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Convert rows of a stack, from expert ``start`` on, to checkpoint tensors in the order of ``hf_slots``."""
        rows = enumerate(segment, start)
        return [part for i, row in rows for part in hf_names.experts_from(self.model, name, row[None], i)]

    def _layout(self, name: str, tensor: torch.Tensor) -> tuple[str, _ExpertLayout | None]:
        """Return a tensor's name in the checkpoint; for a stack of experts its own name, and its layout."""
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        found = list(hf_names.as_checkpoint(self.model, [(name, whole)], waiting={}))
        if len(found) == 1 and found[0][1] is whole:
            return found[0][0], None
        if not found or hf_names.expert_of(found[0][0]) is None:
            rule = f"do not store {name} as a tensor of its own."
            raise ValueError(f"checkpoints of {self.model.config.model_type} {rule}")
        count = tensor.shape[1:].numel()
        found = list(hf_names.as_checkpoint(self.model, [(name, torch.arange(count).view(1, *tensor.shape[1:]))]))
        slot_of, position = torch.full((count,), -1), torch.full((count,), -1)
        for slot, (_, sources) in enumerate(found):
            slot_of[sources.reshape(-1)] = slot
            position[sources.reshape(-1)] = torch.arange(sources.numel())
        if sum(sources.numel() for _, sources in found) != count or (slot_of < 0).any():
            raise ValueError(f"the converter does not map elements of {name} one to one to those of a checkpoint.")
        device = self.meshes.dense.device_type
        slots = tuple((own, tuple(sources.shape)) for own, sources in found)
        return name, _ExpertLayout(slots, slot_of.to(device), position.to(device, torch.int32))


def experts_entry(
    spec: ExpertsSpec, lidx: torch.Tensor, lval: torch.Tensor
) -> tuple[list, str, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the delta entry (``hf_delta_export``) of a stack from its changes in this rank's shard.

    Args:
        lidx: flat positions, int64.
        lval: new values.

    Returns:
        Slots, dtype, number of changes per slot, and their positions (int32) and values in the order of the slots.
    """
    rows, slots = spec.rows, spec.hf_slots
    assert rows is not None and slots is not None and spec.place is not None
    row_numel = rows.slot_of.numel()
    at = translate_flat_indices(lidx, spec.place)
    row, element = at // row_numel, at % row_numel
    slot = row * len(rows.slots) + rows.slot_of[element]
    order = torch.argsort(slot, stable=True)
    counts = torch.bincount(slot, minlength=len(slots)).cpu()
    return slots, str(lval.dtype).removeprefix("torch."), counts, rows.position[element][order], lval[order]
