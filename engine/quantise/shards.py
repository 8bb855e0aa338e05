"""Quantise a rank's shards to FP8 or INT8 with the scales of whole weights."""

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..topology.dtensor import local_ranges
from ..topology.index_ranges import IndexRange, slices_in_shard
from .schemes import Scheme

__all__ = ["QuantisedShards"]


class QuantisedShards:
    """Map a tensor to this rank's values to send: quantised if its name is in ``weights``, else unchanged.

    An all-reduce of the maxima gives every rank the float32 scales of whole weights. A call is collective: all ranks
    call with the same tensors in the same order.

    Args:
        weights: sharded weights ``[..., rows, columns]`` by name, the same names on all ranks.
        values: returns the local values of a tensor; rounded to bfloat16 before quantisation.
        device: device type of the all-reduce, over the default group.
        limit: bytes of scales per all-reduce; a single weight may exceed it.
        wait: waits for a collective; raises if another rank has left the sync.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        values: Callable[[str, torch.Tensor], torch.Tensor],
        scheme: Scheme,
        device: str,
        limit: int,
        wait: Callable[[Any], object] = lambda work: work.wait(),
    ):
        self._weights, self._values, self._scheme, self._device = weights, values, scheme, device
        self._limit, self._wait = limit, wait
        self._missing = {name: scheme.sharing(IndexRange.of(weight.shape)) for name, weight in weights.items()}
        self._scales: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in self._weights:
            return self._values(name, tensor)
        scales, local = self.scales_of(name), self._values(name, tensor)
        found = torch.empty(local.shape, dtype=self._scheme.dtype, device=local.device)
        for held, inside, shared in self._parts(name):
            self._scheme.quantise(local[inside], scales[shared].to(local.device), held, found[inside])
        return found

    @torch.no_grad()
    def scales_of(self, name: str) -> torch.Tensor:
        """Return all float32 scales of a weight; collective."""
        if name in self._missing:
            self._add_scales(name)
        return self._scales[name]

    def _add_scales(self, first: str) -> None:
        """Compute the scales of ``first``, and of as many other weights as the limit allows; collective."""
        order = [first, *(name for name in self._missing if name != first)]
        ends = list(itertools.accumulate(4 * self._missing[name].numel for name in order))
        whole = {name: self._missing.pop(name) for name in order[: max(1, bisect.bisect(ends, self._limit))]}
        sizes = [scales.numel for scales in whole.values()]
        maxima = torch.zeros(sum(sizes), dtype=torch.float32, device=self._device)
        grids = {n: part.view(s.shape) for (n, s), part in zip(whole.items(), maxima.split(sizes), strict=True)}
        for name, grid in grids.items():
            local = self._values(name, self._weights[name])
            for held, inside, shared in self._parts(name):
                maxima_of_part = self._scheme.maxima(local[inside], held).to(grid.device)
                grid[shared] = torch.maximum(grid[shared], maxima_of_part)
        self._wait(dist.all_reduce(maxima, dist.ReduceOp.MAX, async_op=True))
        self._scales |= {name: self._scheme.scales(grid) for name, grid in grids.items()}

    def _parts(self, name: str) -> Iterator[tuple[IndexRange, tuple[slice, ...], tuple[slice, ...]]]:
        """Yield each range of a weight on this rank, its slices in the shard, and its slices in the scales."""
        ranges = local_ranges(self._weights[name])
        for held in ranges:
            if held.numel:
                yield held, slices_in_shard(held, ranges), self._scheme.sharing(held).slices
