"""A rank's shards in FP8 or INT8, with the scales of whole weights."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ...engine.lora.merge import LocalValues
from ...engine.topology.dtensor import local_ranges
from ...engine.topology.index_ranges import IndexRange, slices_in_shard
from .schemes import Scheme

__all__ = ["QuantisedShards"]


class QuantisedShards:
    """Maps a tensor to this rank's values to send: quantised where it is one of ``weights``, else as they are.

    Scales are of whole weights: the largest values of the elements that share one are reduced over all ranks, in one
    all-reduce for the model, so that every rank has all scales, of 4 bytes each.

    Args:
        weights: sharded weights ``[..., rows, columns]`` by name, equal on all ranks.
        values: returns the local values of a tensor; they are rounded to bfloat16 before they are quantised.
        scheme: what shares a scale, and the dtype of the values.
        device: device type of the tensors that the default group's backend sends.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], values: LocalValues, scheme: Scheme, device: str):
        self._weights, self._values, self.scheme = weights, values, scheme
        self._last: tuple[str, torch.Tensor] | None = None  # a tensor that is sent in parts is needed several times
        shapes = {name: scheme.sharing(IndexRange.of(weight.shape)).shape for name, weight in weights.items()}
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        maxima = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        grids = {
            name: part.view(shape) for (name, shape), part in zip(shapes.items(), maxima.split(sizes), strict=True)
        }
        with torch.no_grad():
            for name, weight in weights.items():
                self._add_maxima(grids[name], name, weight)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        self.nbytes = maxima.nbytes
        self.scales = {name: scheme.scales(grid) for name, grid in grids.items()}

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in self._weights:
            return self._values(name, tensor)
        if self._last is None or self._last[0] != name:
            self._last = None
            with torch.no_grad():
                self._last = (name, self._quantised(name, tensor))
        return self._last[1]

    def _add_maxima(self, grid: torch.Tensor, name: str, weight: torch.Tensor) -> None:
        local, ranges = self._values(name, weight), local_ranges(weight)
        for held in filter(_has_elements, ranges):
            found = self.scheme.maxima(local[slices_in_shard(held, ranges)], held)
            at = grid[self.scheme.sharing(held).slices]
            at.copy_(torch.maximum(at, found.to(grid.device)))

    def _quantised(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        local, ranges = self._values(name, weight), local_ranges(weight)
        found = torch.empty(local.shape, dtype=self.scheme.dtype, device=local.device)
        for held in filter(_has_elements, ranges):
            inside = slices_in_shard(held, ranges)
            scales = self.scales[name][self.scheme.sharing(held).slices].to(local.device)
            self.scheme.quantise(local[inside], scales, held, found[inside])
        return found


def _has_elements(held: IndexRange) -> bool:
    return held.numel > 0
