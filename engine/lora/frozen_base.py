"""The weights that adapters are trained on: which they are, and checksums that tell whether others are the same."""

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

_CHUNK = 1 << 22  # elements whose checksum is computed at a time
_MULTIPLIER = -7046029254386353131  # odd, with bits in all places; as int64


def base_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the frozen parameters and the persistent buffers of a model with adapters, by name.

    A critic's head, which is drawn where the checkpoint has none, is left out: its trained copy is what counts.
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
    """Return the checksum of a tensor that is not sharded."""
    return int(_sum_of(tensor, IndexRange.of(tensor.shape), tensor.shape))


def difference(saved: dict[str, list[Any]], own: dict[str, list[Any]]) -> list[str]:
    """Describe each tensor in which two bases differ, whatever their dtypes; empty if there is none."""
    wrong = [f"{name} is missing" for name in saved if name not in own]
    wrong += [f"{name} is new" for name in own if name not in saved]
    for name in saved:
        if name in own and saved[name][:2] != own[name][:2]:
            shape, other = saved[name][0], own[name][0]
            wrong.append(f"{name} was {tuple(shape)}, and is {tuple(other)}" if shape != other else f"{name} differs")
    return wrong


def _own_share(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of the checksum that this rank counts: of what several ranks hold, the first of them."""
    if isinstance(tensor, DTensor):
        cut, mesh = {step.axis for step in shard_steps(tensor)}, tensor.device_mesh
        is_first = all(mesh.get_local_rank(axis) == 0 for axis in mesh.mesh_dim_names or () if axis not in cut)
    else:
        is_first = dist.get_rank() == 0
    sums = [_sum_of(values.detach(), held, tensor.shape) for held, values in local_pieces(tensor)] if is_first else []
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def _sum_of(values: torch.Tensor, held: IndexRange, shape: torch.Size) -> torch.Tensor:
    """Return the sum of the bits of float32 values, each times an odd number that is made of its place in the tensor.

    In float32, so that a checkpoint in bfloat16 has one checksum whatever dtype it is kept in.
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
    """The weights that a rollout was sent once, below its adapters, are others in the trainer now."""


class SentBase:
    """The frozen weights as the rollout has them, by their checksums.

    Args:
        model: sharded, with adapters.
    """

    def __init__(self, model: Any):
        self._model = model
        self._sent: dict[str, list[Any]] | None = None
        self._may_differ = False

    def record(self) -> None:
        """Remember the weights that are about to be sent; collective."""
        self._sent, self._may_differ = base_checksums(self._model), False

    def loaded(self) -> None:
        """Note that a checkpoint was loaded, which may have had other weights."""
        self._may_differ = True

    def check(self, wanted: bool) -> None:
        """Compare the weights with those that were sent, where that is wanted or a checkpoint was loaded; collective.

        Raises:
            BaseChangedError: they differ.
        """
        if self._sent is None:  # vLLM has read them from the model's checkpoint
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
