"""Merge adapters into weights, one weight at a time and shard by shard; the trained parameters are unchanged.

A shard of ``W + scaling * B @ A`` needs the matching rows of ``B`` and columns of ``A``. So a weight's adapter is
gathered when the weight is requested, for experts among the ranks that share them. Weights are not gathered: DoRA's
norms need whole rows, and FSDP does not split a row of a linear.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from ..topology.dtensor import is_adapter, local_pieces, local_ranges, local_tensor, shard_steps
from ..topology.index_ranges import IndexRange, bounding_range, slices_in_shard
from .adapters import MAGNITUDE, SAVED, A, B, lora_of

__all__ = ["AdapterUse", "local_values", "merged", "weights"]

# The use of adapters in a sync: merged into weights, left out, or sent without weights.
AdapterUse = Literal["merged", "left out", "alone"]


def weights(model: nn.Module, of_adapters: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the parameters of the merged model, all but the adapters', or over those of the adapters."""
    return ((name, param) for name, param in model.named_parameters() if is_adapter(name) == of_adapters)


def local_values(
    model: nn.Module,
    device: torch.device | str,
    adapters: AdapterUse = "merged",
    wait: Callable[[dist.Work], object] = dist.Work.wait,
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return a function from a tensor's name and the tensor to the values that this rank holds.

    With adapters to merge its calls are collective: all ranks pass the same tensors in the same order, also ranks that
    don't use the values. Only the last values are cached.

    Args:
        device: device type of the mesh's backend.
        wait: waits for a gather; raises if another rank has left the sync.
    """
    if adapters != "merged" or lora_of(model) is None:
        return lambda name, tensor: local_tensor(tensor).detach()
    return _MergedShards(model, device, wait)


def merged(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    is_transposed: bool = False,
    magnitude: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``weight + scaling * b @ a`` in the weight's dtype, computed in float32; with DoRA, scale the rows.

    Args:
        weight: ``(..., out, in)``, or ``(..., in, out)`` where ``is_transposed``.
        a: ``(..., r, in)``.
        b: ``(..., out, r)``.
        magnitude: DoRA's ``(out,)``.
    """
    left, right = (a.mT, b.mT) if is_transposed else (b, a)
    whole = torch.add(weight.float(), left.float() @ right.float(), alpha=scaling)
    if magnitude is not None:
        whole *= (magnitude.float() / torch.linalg.norm(whole, dim=1))[:, None]
    return whole.to(weight.dtype)


class _MergedShards:
    def __init__(self, model: nn.Module, device: torch.device | str, wait: Callable[[dist.Work], object]):
        self._lora = cast(Any, lora_of(model))
        self._model, self._device, self._wait = model, device, wait
        self._saved = set(self._lora.saved)
        self._last: tuple[str, torch.Tensor] | None = None  # a tensor sent in parts is requested several times

    @torch.no_grad()
    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in self._saved:
            return local_tensor(self._model.get_parameter(name + SAVED)).detach()
        if name not in self._lora.targets:
            return local_tensor(tensor).detach()
        if self._last is None or self._last[0] != name:
            self._last = None  # frees its memory
            self._last = (name, self._merged(name, tensor.detach()))
        return self._last[1]

    def _merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        params = (self._model.get_parameter(name + half) for half in (A, B))
        (held_a, a), (held_b, b) = (_gathered(param, self._device, self._wait) for param in params)
        magnitude, target = None, self._lora.targets[name]
        if self._lora.settings.use_dora:
            magnitude = local_tensor(self._model.get_parameter(name + MAGNITUDE)).detach()  # sharded like the rows
        ranges, found = local_ranges(weight), torch.empty_like(local_tensor(weight))
        for held, local in local_pieces(weight):
            low, high, (first, second) = held.low[:-2], held.high[:-2], zip(held.low[-2:], held.high[-2:], strict=True)
            into, out = (first, second) if target.is_transposed else (second, first)
            in_a = IndexRange((*low, 0, into[0]), (*high, target.rank, into[1])).slices_in(held_a)
            in_b = IndexRange((*low, out[0], 0), (*high, out[1], target.rank)).slices_in(held_b)
            parts = a[in_a].to(local.device), b[in_b].to(local.device)
            values = merged(local, *parts, target.scaling, target.is_transposed, magnitude)
            found[slices_in_shard(held, ranges)] = values
        return found


def _gathered(
    param: torch.Tensor, device: torch.device | str, wait: Callable[[dist.Work], object]
) -> tuple[IndexRange, torch.Tensor]:
    """Gather a parameter over the axes that shard it, except ``ep``; return its range and values; collective."""
    shard = local_tensor(param).detach().to(device)
    axes = [step.axis for step in shard_steps(param) if step.axis != "ep" and step.parts > 1]
    if not axes:
        return local_ranges(param)[0], shard
    mesh = param.device_mesh  # type: ignore[attr-defined]
    # In the order of the gathered values: the last axis is gathered last, so its index varies slowest.
    places = [
        dict(zip(axes, at[::-1], strict=True)) for at in itertools.product(*(range(mesh[a].size()) for a in axes[::-1]))
    ]
    held_by = [local_ranges(param, at) for at in places]
    most = max(sum(held.numel for held in ranges) for ranges in held_by)
    values = shard.new_zeros(most)
    values[: shard.numel()] = shard.reshape(-1)
    for axis in axes:
        everyone = values.new_empty(mesh[axis].size() * values.numel())
        work = dist.all_gather_into_tensor(everyone, values, group=mesh.get_group(axis), async_op=True)
        assert work is not None
        wait(work)
        values = everyone
    whole = bounding_range([held for ranges in held_by for held in ranges])
    found = shard.new_empty(whole.shape)
    for ranges, padded in zip(held_by, values.split(most), strict=True):
        part = padded[: sum(held.numel for held in ranges)]
        for held in ranges if part.numel() else ():
            found[held.slices_in(whole)] = _in_shard(part, held, ranges)
    return whole, found


def _in_shard(part: torch.Tensor, held: IndexRange, ranges: tuple[IndexRange, ...]) -> torch.Tensor:
    """Return the values of one range of a flattened shard."""
    shape = list(held.shape)
    for dim in {d for other in ranges for d in range(len(shape)) if other.low[d] != held.low[d]}:
        shape[dim] = sum(other.shape[dim] for other in ranges)
    return part.view(shape)[slices_in_shard(held, ranges)]
