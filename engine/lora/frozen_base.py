"""The frozen weights below adapters, and checksums to compare them."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import listed
from ..topology.dtensor import checkpoint_tensors, is_adapter, local_pieces, shard_steps
from ..topology.index_ranges import IndexRange
from .adapters import lora_of

__all__ = ["BaseChangedError", "SentBase", "base_checksums", "base_tensors", "checksum", "difference"]

_CHUNK = 1 << 22  # elements per step of a checksum
_MULTIPLIER = -7046029254386353131  # an odd int64 with high and low bits set


def base_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the frozen parameters and the persistent buffers of a model with adapters, by name.

    The original of a critic's head is left out, because its values are random and only its trained copy is used.
    """
    lora = lora_of(model)
    head = lora.settings.value_head if lora is not None else ""
    return {
        name: tensor
        for name, tensor in checkpoint_tensors(model).items()
        if not is_adapter(name) and not (head and name.startswith(f"{head}."))
    }


@torch.no_grad()
def base_checksums(model: nn.Module) -> dict[str, list[Any]]:
    """Return shape, checksum and dtype of each tensor of ``base_tensors``, equal on every mesh; collective."""
    tensors = base_tensors(model)
    device = next((t.device_mesh.device_type for t in tensors.values() if isinstance(t, DTensor)), "cpu")
    sums = torch.stack([_own_share(tensor).to(device) for tensor in tensors.values()])
    dist.all_reduce(sums)  # modulo 2 ** 64
    return {
        name: [list(t.shape), value, str(t.dtype).removeprefix("torch.")]
        for (name, t), value in zip(tensors.items(), sums.tolist(), strict=True)
    }


def checksum(tensor: torch.Tensor) -> int:
    """Return the checksum of an unsharded tensor."""
    return int(_sum_of(tensor, IndexRange.of(tensor.shape), tensor.shape))


def difference(saved: dict[str, list[Any]], own: dict[str, list[Any]]) -> list[str]:
    """Describe each tensor in which two bases differ, except in dtype."""
    wrong = [f"{name} is missing" for name in saved if name not in own]
    wrong += [f"{name} is new" for name in own if name not in saved]
    for name in saved:
        if name in own and saved[name][:2] != own[name][:2]:
            shape, other = saved[name][0], own[name][0]
            wrong.append(f"{name} was {tuple(shape)}, and is {tuple(other)}" if shape != other else f"{name} differs")
    return wrong


def _own_share(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a checksum: its shard, if it is the first rank that holds it."""
    if isinstance(tensor, DTensor):
        cut, mesh = {step.axis for step in shard_steps(tensor)}, tensor.device_mesh
        is_first = all(mesh.get_local_rank(axis) == 0 for axis in mesh.mesh_dim_names or () if axis not in cut)
    else:
        is_first = dist.get_rank() == 0
    sums = [_sum_of(values.detach(), held, tensor.shape) for held, values in local_pieces(tensor)] if is_first else []
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def _sum_of(values: torch.Tensor, held: IndexRange, shape: torch.Size) -> torch.Tensor:
    """Return the sum of the values' float32 bits, each times an odd number that depends on its index in the tensor.

    In float32, so a bfloat16 checkpoint has one checksum in both dtypes.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if not values.dim():
        values, held, shape = values[None], IndexRange((0,), (1,)), torch.Size([1])
    if not values.numel():
        return total
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = torch.zeros((1,) * (values.dim() - 1), dtype=torch.int64, device=values.device)
    for dim in range(1, values.dim()):
        along = torch.arange(held.low[dim], held.high[dim], device=values.device) * strides[dim]
        inner = inner + along.view(*(-1 if other == dim else 1 for other in range(1, values.dim())))
    rows = max(1, _CHUNK * values.shape[0] // values.numel())
    for start in range(0, values.shape[0], rows):
        part = values[start : start + rows]
        bits = part.float().contiguous().view(torch.int32).long()
        outer = torch.arange(held.low[0] + start, held.low[0] + start + part.shape[0], device=values.device)
        places = outer.view(-1, *(1 for _ in range(values.dim() - 1))) * strides[0] + inner
        total = total + (bits * (((places + 1) * _MULTIPLIER) | 1)).sum()
    return total


class BaseChangedError(RuntimeError):
    """The frozen weights of the trainer differ from those that were sent to the rollout."""


class SentBase:
    """Checksums of the frozen weights that were sent to the rollout.

    Args:
        model: a sharded model with adapters.
    """

    def __init__(self, model: Any):
        self._model = model
        self._sent: dict[str, list[Any]] | None = None
        self._may_differ = False

    def record(self) -> None:
        """Record the weights before they are sent; collective."""
        self._sent, self._may_differ = base_checksums(self._model), False

    def loaded(self) -> None:
        """Note that a checkpoint was loaded, maybe with other weights."""
        self._may_differ = True

    def check(self, wanted: bool) -> None:
        """Compare the weights with those sent, if ``wanted`` or after a checkpoint was loaded; collective.

        Raises:
            BaseChangedError: the weights differ.
        """
        if self._sent is None:  # the rollout has read them from the model's checkpoint
            self.record()
        if not wanted and not self._may_differ:
            return
        changed = difference(self._sent or {}, base_checksums(self._model))
        if changed:
            raise BaseChangedError(
                f"the frozen weights have changed after they were sent to the rollout: {listed(changed)}. It is sent "
                "adapters alone; actor_rollout_ref.model.lora.merge=True sends the weights in every sync."
            )
        self._may_differ = False
