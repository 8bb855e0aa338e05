"""Weights with their adapters merged in, one at a time, shard by shard; what is trained stays as it is.

A shard of ``W + alpha/r * B @ A`` takes the rows of ``B`` and the columns of ``A`` that go with it. So adapters are
brought together over what FSDP cut, those of experts among the ranks that share these experts, and no weight is.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..topology.dtensor import is_adapter, local_range, local_tensor, shard_steps
from ..topology.index_ranges import IndexRange, bounding_range
from .adapters import A, B, lora_of

__all__ = ["LocalValues", "local_values", "merged", "weights"]

# Of a tensor by its name, what this rank holds.
LocalValues = Callable[[str, torch.Tensor], torch.Tensor]


def weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A model's parameters without adapters: what a model is that has them merged."""
    return ((name, param) for name, param in model.named_parameters() if not is_adapter(name))


def local_values(model: nn.Module, device: torch.device | str) -> LocalValues:
    """What to ask for a tensor's local values, adapters merged; collective where the model has adapters.

    Args:
        device: where the mesh's backend takes tensors from.
    """
    if lora_of(model) is None:
        return lambda name, tensor: local_tensor(tensor).detach()
    return _MergedShards(model, device)


def merged(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, is_transposed: bool = False
) -> torch.Tensor:
    """``weight + scaling * b @ a``, computed in float32, in the weight's dtype.

    Args:
        weight: ``(..., out, in)``, or ``(..., in, out)`` where ``is_transposed``.
        a: ``(..., r, in)``.
        b: ``(..., out, r)``.
    """
    left, right = (a.mT, b.mT) if is_transposed else (b, a)
    return torch.add(weight.float(), left.float() @ right.float(), alpha=scaling).to(weight.dtype)


@dataclass(frozen=True)
class _Gathered:
    """An adapter's half: all that is of the experts of this rank."""

    box: IndexRange
    values: torch.Tensor

    def part(self, low: tuple[int, ...], high: tuple[int, ...]) -> torch.Tensor:
        """The values of a box inside."""
        return self.values[IndexRange(low, high).slices_in(self.box)]


class _MergedShards:
    def __init__(self, model: nn.Module, device: torch.device | str):
        lora = lora_of(model)
        assert lora is not None, "a model without adapters has nothing to merge"
        self._lora = lora
        self._halves = {
            name: (_gathered(model.get_parameter(name + A), device), _gathered(model.get_parameter(name + B), device))
            for name in lora.targets
        }
        self._last: tuple[str, torch.Tensor] | None = None  # a tensor that is sent in parts is asked for again

    @torch.no_grad()
    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor).detach()
        if name not in self._halves:
            return local
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = (name, self._merged(name, local, local_range(tensor)))
        return self._last[1]

    def _merged(self, name: str, local: torch.Tensor, box: IndexRange) -> torch.Tensor:
        a, b = self._halves[name]
        transposed, rank = self._lora.targets[name].is_transposed, self._lora.settings.rank
        experts = slice(0, len(box.low) - 2)
        (low, high), (first, second) = (
            (box.low[experts], box.high[experts]),
            zip(box.low[-2:], box.high[-2:], strict=True),
        )
        into, out = (first, second) if transposed else (second, first)
        of_a = a.part((*low, 0, into[0]), (*high, rank, into[1]))
        of_b = b.part((*low, out[0], 0), (*high, out[1], rank))
        return merged(local, of_a.to(local.device), of_b.to(local.device), self._lora.scaling, transposed)


def _gathered(param: torch.Tensor, device: torch.device | str) -> _Gathered:
    """Bring together what the ranks that share these experts, or all ranks, have of a parameter; collective."""
    shard = local_tensor(param).detach().to(device)
    axes = [cut.axis for cut in shard_steps(param) if cut.axis != "ep" and cut.parts > 1]
    if not axes:
        return _Gathered(local_range(param), shard)
    (axis,) = axes
    mesh = param.device_mesh  # type: ignore[attr-defined]
    boxes = [local_range(param, {axis: index}) for index in range(mesh[axis].size())]
    most = max(box.numel for box in boxes)
    mine = shard.new_zeros(most)
    mine[: shard.numel()] = shard.reshape(-1)
    everyone = shard.new_empty(len(boxes) * most)
    dist.all_gather_into_tensor(everyone, mine, group=mesh.get_group(axis))
    whole = bounding_range(boxes)
    values = shard.new_empty(whole.shape)
    for box, held in zip(boxes, everyone.split(most), strict=True):
        if box.numel:
            values[box.slices_in(whole)] = held[: box.numel].view(box.shape)
    return _Gathered(whole, values)
