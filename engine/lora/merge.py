"""Merge adapters into weights, one weight at a time and shard by shard; the trained parameters are unchanged.

A shard of ``W + alpha/r * B @ A`` needs the matching rows of ``B`` and columns of ``A``. So adapters are gathered over
the FSDP axes, those of experts among the ranks that share these experts; weights are not gathered.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from ..topology.dtensor import is_adapter, local_range, local_tensor, shard_steps
from ..topology.index_ranges import IndexRange, bounding_range
from .adapters import A, B, lora_of

__all__ = ["AdapterUse", "LocalValues", "adapter_weights", "local_values", "merged", "weights"]

# Maps a tensor and its name to the values that this rank holds.
LocalValues = Callable[[str, torch.Tensor], torch.Tensor]
# What becomes of adapters where weights are sent.
AdapterUse = Literal["merged", "left out", "alone"]


def weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over a model's parameters without adapters, which are those of the merged model."""
    return ((name, param) for name, param in model.named_parameters() if not is_adapter(name))


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the parameters of a model's adapters."""
    return ((name, param) for name, param in model.named_parameters() if is_adapter(name))


def local_values(model: nn.Module, device: torch.device | str, adapters: AdapterUse = "merged") -> LocalValues:
    """Return a function from a tensor to its local values; collective if there are adapters to merge.

    Args:
        device: device type of the tensors that the mesh's backend sends.
    """
    if adapters != "merged" or lora_of(model) is None:
        return lambda name, tensor: local_tensor(tensor).detach()
    return _MergedShards(model, device)


def merged(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, is_transposed: bool = False
) -> torch.Tensor:
    """Return ``weight + scaling * b @ a``, computed in float32, in the weight's dtype.

    Args:
        weight: ``(..., out, in)``, or ``(..., in, out)`` where ``is_transposed``.
        a: ``(..., r, in)``.
        b: ``(..., out, r)``.
    """
    left, right = (a.mT, b.mT) if is_transposed else (b, a)
    return torch.add(weight.float(), left.float() @ right.float(), alpha=scaling).to(weight.dtype)


@dataclass(frozen=True)
class _Gathered:
    """``A`` or ``B`` of an adapter, gathered over the FSDP axes; for experts those of this rank."""

    held: IndexRange
    values: torch.Tensor

    def part(self, low: tuple[int, ...], high: tuple[int, ...]) -> torch.Tensor:
        """Return the values of a range inside."""
        return self.values[IndexRange(low, high).slices_in(self.held)]


class _MergedShards:
    def __init__(self, model: nn.Module, device: torch.device | str):
        lora = lora_of(model)
        assert lora is not None, "a model without adapters has nothing to merge"
        self._lora = lora
        self._halves = {
            name: (_gathered(model.get_parameter(name + A), device), _gathered(model.get_parameter(name + B), device))
            for name in lora.targets
        }
        self._last: tuple[str, torch.Tensor] | None = None  # a tensor that is sent in parts is needed several times

    @torch.no_grad()
    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor).detach()
        if name not in self._halves:
            return local
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = (name, self._merged(name, local, local_range(tensor)))
        return self._last[1]

    def _merged(self, name: str, local: torch.Tensor, held: IndexRange) -> torch.Tensor:
        a, b = self._halves[name]
        transposed, rank = self._lora.targets[name].is_transposed, self._lora.settings.rank
        experts = slice(0, len(held.low) - 2)
        (low, high), (first, second) = (
            (held.low[experts], held.high[experts]),
            zip(held.low[-2:], held.high[-2:], strict=True),
        )
        into, out = (first, second) if transposed else (second, first)
        of_a = a.part((*low, 0, into[0]), (*high, rank, into[1]))
        of_b = b.part((*low, out[0], 0), (*high, out[1], rank))
        return merged(local, of_a.to(local.device), of_b.to(local.device), self._lora.scaling, transposed)


def _gathered(param: torch.Tensor, device: torch.device | str) -> _Gathered:
    """Gather a parameter over the FSDP axis, for experts within the ranks that share them; collective."""
    shard = local_tensor(param).detach().to(device)
    axes = [step.axis for step in shard_steps(param) if step.axis != "ep" and step.parts > 1]
    if not axes:
        return _Gathered(local_range(param), shard)
    (axis,) = axes
    mesh = param.device_mesh  # type: ignore[attr-defined]
    ranges = [local_range(param, {axis: index}) for index in range(mesh[axis].size())]
    most = max(each.numel for each in ranges)
    mine = shard.new_zeros(most)
    mine[: shard.numel()] = shard.reshape(-1)
    everyone = shard.new_empty(len(ranges) * most)
    dist.all_gather_into_tensor(everyone, mine, group=mesh.get_group(axis))
    whole = bounding_range(ranges)
    values = shard.new_empty(whole.shape)
    for each, padded in zip(ranges, everyone.split(most), strict=True):
        if each.numel:
            values[each.slices_in(whole)] = padded[: each.numel].view(each.shape)
    return _Gathered(whole, values)
