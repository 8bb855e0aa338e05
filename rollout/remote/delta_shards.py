"""This rank's shards under the names of a checkpoint, for verl's ``delta_sharded`` backend.

That backend sends the elements that a step has changed. Each rank compares its shards with those of the last sync, and
what has changed goes to rank 0 by name and position in the checkpoint (verl 0.9.1, ``workers/engine/spec.py`` and
``workers/engine/utils.py``, ``hf_delta_export``). A stack of experts is one matrix or more per expert there; which
element of a stack becomes which is found by sending positions, instead of values, through transformers' own converter.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from verl.workers.engine.spec import BlockPlacement, ShardSpec, translate_flat_indices

from ...engine.lora.merge import local_values
from ...engine.model import hf_names
from ...engine.topology.dtensor import checkpoint_tensors, is_adapter, local_range, shard_steps
from ...engine.topology.mesh import Meshes

__all__ = ["ExpertsSpec", "ShardExport", "experts_entry"]


@dataclass(frozen=True)
class _Rows:
    """How an expert of a stack, a row of it, lies in the checkpoint.

    Args:
        slots: names, for expert 0, and shapes of the matrices that a row becomes.
        slot_of: per element of a row, in which of these it goes.
        position: and where in it.
    """

    slots: tuple[tuple[str, tuple[int, ...]], ...]
    slot_of: torch.Tensor
    position: torch.Tensor


@dataclass
class ExpertsSpec(ShardSpec):
    """verl's description of a shard, with what ``experts_entry`` needs of the stack that it is of."""

    rows: _Rows | None = field(default=None, repr=False)


class ShardExport:
    """An engine's side of all its delta syncs; how a stack lies in a checkpoint is found out once.

    Args:
        model: sharded.
        dtype: in which floating-point values are sent. verl's first sync casts them to bfloat16, and what is compared
            has to be what was sent.
    """

    def __init__(self, model: nn.Module, meshes: Meshes, dtype: torch.dtype = torch.bfloat16):
        self.model: Any = model
        self.meshes, self.dtype = meshes, dtype
        self._names: dict[str, str] = {}
        self._stacks: dict[str, _Rows] = {}

    def shards(self) -> Iterator[tuple[str, torch.Tensor, ShardSpec]]:
        """``(name, values, spec)`` of every parameter and persistent buffer, in an order that all ranks share.

        Names are those of the checkpoint; of a stack of experts, whose matrices ``spec.hf_slots`` names, the model's.
        Values are this rank's shard, flat, with its adapter merged. A tied parameter comes once.

        Raises:
            ValueError: for a tensor that the checkpoint holds in another form, but for stacks of experts.
        """
        device = self.meshes.dense.device_type
        tensors = {name: tensor for name, tensor in checkpoint_tensors(self.model).items() if not is_adapter(name)}
        local = local_values(self.model, device)
        for name, tensor in tensors.items():
            values = local(name, tensor).to(device)
            if values.is_floating_point():
                values = values.to(self.dtype)
            yield self._checkpoint_name(name, tensor), values.reshape(-1), self._spec(name, tensor)

    def _spec(self, name: str, tensor: torch.Tensor) -> ShardSpec:
        box, shape = local_range(tensor), tuple(tensor.shape)
        if not shard_steps(tensor):
            return ShardSpec(full_shape=shape)  # whole on every rank; verl takes rank 0's
        placed: dict[str, Any] = {
            "full_shape": shape,
            "place": BlockPlacement(box.shape, box.low, shape),
            "gather_group": self.meshes.replica_group,
            # The other replicas of the trainer hold the same.
            "contributes": self.meshes.dense.get_local_rank("dp_replicate") == 0,
        }
        rows = self._stacks.get(name)
        if rows is None:
            return ShardSpec(**placed)
        slots = [
            (hf_names.shift_expert_index(slot, expert), size) for expert in range(shape[0]) for slot, size in rows.slots
        ]
        return ExpertsSpec(**placed, hf_slots=slots, to_hf_chunk=partial(self._chunk, name), rows=rows)

    def _chunk(self, name: str, start: int, segment: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Experts from ``start`` on, as the checkpoint has them: expert by expert, as ``hf_slots`` lists them."""
        one_by_one = (hf_names.as_checkpoint(self.model, [(name, row[None])]) for row in segment)
        return [
            (hf_names.shift_expert_index(own, start + i), values)
            for i, row in enumerate(one_by_one)
            for own, values in row
        ]

    def _checkpoint_name(self, name: str, tensor: torch.Tensor) -> str:
        if name not in self._names:
            self._names[name] = self._look_up(name, tensor)
        return self._names[name]

    def _look_up(self, name: str, tensor: torch.Tensor) -> str:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        found = list(hf_names.as_checkpoint(self.model, [(name, whole)], waiting={}))
        if len(found) == 1 and found[0][1] is whole:
            return found[0][0]
        if found and hf_names.is_of_expert(found[0][0]):
            self._stacks[name] = self._probe(name, tuple(tensor.shape[1:]))
            return name
        raise ValueError(f"{name} is no tensor of its own in a checkpoint of {self.model.config.model_type}.")

    def _probe(self, name: str, shape: tuple[int, ...]) -> _Rows:
        count = torch.Size(shape).numel()
        found = list(hf_names.as_checkpoint(self.model, [(name, torch.arange(count).view(1, *shape))]))
        slot_of, position = torch.full((count,), -1), torch.full((count,), -1)
        for slot, (_, sources) in enumerate(found):
            slot_of[sources.reshape(-1)] = slot
            position[sources.reshape(-1)] = torch.arange(sources.numel())
        if sum(sources.numel() for _, sources in found) != count or (slot_of < 0).any():
            raise ValueError(f"the elements of an expert of {name} are not those of its tensors in the checkpoint.")
        device = self.meshes.dense.device_type
        slots = tuple((own, tuple(sources.shape)) for own, sources in found)
        return _Rows(slots, slot_of.to(device), position.to(device, torch.int32))


def experts_entry(
    spec: ExpertsSpec, lidx: torch.Tensor, lval: torch.Tensor
) -> tuple[list, str, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A delta entry (``hf_delta_export``) of a stack: what changed, by slot of the checkpoint and position in it.

    Args:
        lidx: flat positions in this rank's shard, int64.
        lval: the values there.

    Returns:
        Slots, dtype, counts per slot, and positions (int32) and values in the slots' order.
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
