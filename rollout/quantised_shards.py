"""A rank's shards in FP8 or INT8, with the scales of whole weights."""

import bisect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..engine.lora.merge import LocalValues
from ..engine.quantise.schemes import Scheme
from ..engine.topology.dtensor import local_ranges
from ..engine.topology.index_ranges import IndexRange, slices_in_shard

__all__ = ["QuantisedShards"]


class QuantisedShards:
    """Maps a tensor to this rank's values to send: quantised where it is one of ``weights``, else as they are.

    Scales are of whole weights: the largest values of the elements that share one are reduced over all ranks, so that
    every rank has all scales, of 4 bytes each. Calling it is collective: all ranks ask for the same tensors in the same
    order.

    Args:
        weights: sharded weights ``[..., rows, columns]`` by name, equal on all ranks.
        values: returns the local values of a tensor; they are rounded to bfloat16 before they are quantised.
        scheme: what shares a scale, and the dtype of the values.
        device: device type of the tensors that the default group's backend sends.
        limit: bytes of the scales that are reduced in one all-reduce; those of one weight may have more.
        wait: waits for a collective; raises where another rank has left the sync.

    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        values: LocalValues,
        scheme: Scheme,
        device: str,
        limit: int,
        wait: Callable[[Any], object] = lambda work: work.wait(),
    ):
        self._weights, self._values, self.scheme, self._device = weights, values, scheme, device
        self._wait = wait
        self._last: tuple[str, torch.Tensor] | None = None  # a tensor that is sent in parts is needed several times
        # Shapes of the scales that are not known yet.
        self._missing = {n: torch.Size(scheme.sharing(IndexRange.of(w.shape)).shape) for n, w in weights.items()}
        self._limit = limit
        self.scales: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in self._weights:
            return self._values(name, tensor)
        if self._last is None or self._last[0] != name:
            self._last = None
            self.scales_of(name)
            with torch.no_grad():
                self._last = (name, self._quantised(name, tensor))
        return self._last[1]

    def scales_of(self, name: str) -> torch.Tensor:
        """Return all scales of a weight, float32; collective as calling this is."""
        with torch.no_grad():
            if name in self._missing:
                self._add_scales(name)
        return self.scales[name]

    def _add_scales(self, first: str) -> None:
        """Compute the scales of a weight, and of as many others as the limit allows; collective."""
        order = [first, *(name for name in self._missing if name != first)]
        ends = list(itertools.accumulate(4 * self._missing[name].numel() for name in order))
        names = order[: max(1, bisect.bisect(ends, self._limit))]
        shapes = {name: self._missing.pop(name) for name in names}
        sizes = [shape.numel() for shape in shapes.values()]
        maxima = torch.zeros(sum(sizes), dtype=torch.float32, device=self._device)
        grids = {n: part.view(shape) for (n, shape), part in zip(shapes.items(), maxima.split(sizes), strict=True)}
        for name, grid in grids.items():
            self._add_maxima(grid, name, self._weights[name])
        self._wait(dist.all_reduce(maxima, dist.ReduceOp.MAX, async_op=True))
        self.scales |= {name: self.scheme.scales(grid) for name, grid in grids.items()}

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
