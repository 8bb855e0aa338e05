"""The tensors of a sync to workers that hold weights quantised: values, and the scales of each weight beside it."""

from collections.abc import Callable, Iterable, Mapping

import torch

from ..engine.topology.index_ranges import IndexRange
from .layout.specs import Heads, Rollout, TargetSlice, TensorSpec
from .quantise.schemes import scheme_of
from .servers import is_quantised, slices_of_scales, target_slices

__all__ = ["SCALES", "dtype_in", "slices_of_workers", "with_scales"]

SCALES = "::scales"
"""What follows a weight's name in that of the tensor of its scales, float32, of which every trainer rank has all."""


def with_scales(tensors: Iterable[TensorSpec], rollout: Rollout, family: str) -> list[TensorSpec]:
    """Return the tensors as they are sent to such a rollout: weights that it holds quantised with their scales."""
    if not rollout.is_quantised:
        return list(tensors)
    scheme, found = scheme_of(rollout.block, rollout.channels), []
    for tensor in tensors:
        if not is_quantised(family, tensor.name):
            found.append(tensor)
            continue
        found.append(TensorSpec(tensor.name, tensor.shape, scheme.dtype.itemsize, tensor.cuts))
        found.append(TensorSpec(tensor.name + SCALES, scheme.sharing(IndexRange.of(tensor.shape)).shape, 4))
    return found


def dtype_in(dtypes: Mapping[str, torch.dtype], rollout: Rollout, family: str) -> Callable[[str], torch.dtype]:
    """Return a function from a tensor's name, scales included, to the dtype in which it is sent to such a rollout.

    Args:
        dtypes: in which tensors are sent that are not quantised.
    """
    if not rollout.is_quantised:
        return dtypes.__getitem__
    values = scheme_of(rollout.block, rollout.channels).dtype

    def of(name: str) -> torch.dtype:
        if name.endswith(SCALES):
            return torch.float32
        return values if is_quantised(family, name) else dtypes[name]

    return of


def slices_of_workers(
    tensors: Iterable[TensorSpec], rollout: Rollout, heads: Heads
) -> Callable[[TensorSpec, int], list[TargetSlice]]:
    """Return a function from a tensor, scales included, and the index of a worker to the slices that it keeps."""
    by_name = {tensor.name: tensor for tensor in tensors}

    def of(tensor: TensorSpec, worker: int) -> list[TargetSlice]:
        weight = by_name[tensor.name.removesuffix(SCALES)]
        slices = target_slices(weight, rollout, worker, heads)
        if tensor.name.endswith(SCALES):
            return slices_of_scales(weight, slices, rollout, heads.family)
        return slices

    return of
