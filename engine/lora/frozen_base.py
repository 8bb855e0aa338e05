"""The frozen weights below adapters, and checksums to compare them."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import listed
from ..topology.dtensor import checkpoint_tensors, is_adapter, is_first_holder, local_pieces
from ..topology.index_ranges import IndexRange
from .adapters import lora_of

__all__ = ["BaseChangedError", "SentBase", "base_checksums", "checksum", "difference"]

_CHUNK = 1 << 22  # elements per step of a checksum
_MULTIPLIER = -7046029254386353131  # an odd int64 with high and low bits set


@torch.no_grad()
def base_checksums(model: nn.Module) -> dict[str, list[Any]]:
    """Return shape, checksum and dtype of each frozen parameter and buffer, equal on every mesh; collective.

    The original of a critic's head is left out, because its values are random and only its trained copy is used.
    """
    lora = lora_of(model)
    head = f"{lora.settings.value_head if lora is not None else ''}."  # without a head no name begins with it
    tensors = {
        name: tensor
        for name, tensor in checkpoint_tensors(model).items()
        if not is_adapter(name) and not name.startswith(head)
    }
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
    for name, (shape, value, _) in saved.items():
        other, now, _ = own.get(name, (shape, value, ""))
        if shape != other:
            wrong.append(f"{name} was {tuple(shape)}, and is {tuple(other)}")
        elif value != now:
            wrong.append(f"{name} differs")
    return wrong


def _own_share(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a checksum: its shard, if it is the first rank that holds it."""
    pieces = local_pieces(tensor) if is_first_holder(tensor, dist.get_rank(), replica=0) else ()
    sums = [_sum_of(values.detach(), held, tensor.shape) for held, values in pieces]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def _sum_of(values: torch.Tensor, held: IndexRange, shape: torch.Size) -> torch.Tensor:
    """Return the sum of the values' float32 bits, each times an odd number that depends on its index in the tensor.

    In float32, so a bfloat16 checkpoint has one checksum in both dtypes.
    """
    total = inner = torch.zeros(1, dtype=torch.int64, device=values.device)
    if not values.numel():
        return total[0]
    axes = [
        torch.arange(low, high, device=values.device) * math.prod(shape[dim + 1 :])
        for dim, (low, high) in enumerate(zip(held.low, held.high, strict=True))
    ] or [inner]  # a scalar
    for axis in axes[1:]:
        inner = (inner[:, None] + axis).flatten()
    rows = max(1, _CHUNK // inner.numel())
    for part, outer in zip(torch.atleast_1d(values).split(rows), axes[0].split(rows), strict=True):
        bits = part.flatten().float().view(torch.int32).long()
        places = (outer[:, None] + inner).flatten()
        total = total + (bits * (((places + 1) * _MULTIPLIER) | 1)).sum()
    return total[0]


class BaseChangedError(RuntimeError):
    """The frozen weights of the trainer differ from those that were sent to the rollout."""


class SentBase:
    """Checksums of the frozen weights that were sent to the rollout.

    Args:
        model: a sharded model with adapters.
    """

    def __init__(self, model: Any):
        self._model, self._may_differ = model, False
        self._sent: dict[str, list[Any]] | None = None

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
