"""The parameters of workers, and the blocks of tensors that fill them.

Tensors that fill the same parameter of any worker, such as queries, keys and values, form a ``Bundle``. Rounds send
bundles. Each worker gets its parameters of a bundle whole or, if they are too large, every n-th index along one dim.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..layout.specs import TargetSlice, TensorSpec
from .senders import Ints, Senders

__all__ = ["ALIGNMENT", "Bundle", "Region", "Run", "bundles_of"]

# Tensors with contiguous runs below ``_SHORTEST_RUN`` bytes are sent whole to all workers, if a bundle of them has at
# most ``_LARGEST_SHORT`` bytes.
_SHORTEST_RUN, _LARGEST_SHORT = 64, 4 << 20
ALIGNMENT = 16  # bytes; offsets in buffers are multiples, so that they can be viewed as any dtype
# A run is contiguous at the sender and in the worker's parameter, for every message of a bundle. ``Run`` has its bytes
# and, by tensor, the first dim that a run covers and the number of elements in a row of that dim.
Run = tuple[int, dict[int, tuple[int, int]]]


@dataclass(frozen=True)
class Region:
    """A block of a tensor and its destination."""

    tensor: int  # its number in the group
    low: Ints  # of the block, ``[dims]``; a scalar counts as one row
    high: Ints
    at: Ints  # position of the block's first element in ``shape``, in the tensor's dims
    shape: tuple[int, ...]  # of the destination: the parameter's, or the block's own if the parameter is staged
    part: TargetSlice


@dataclass(frozen=True)
class Parameter:
    """A parameter of one worker."""

    name: str  # in the layer that the plan was made with
    shape: tuple[int, ...]  # without padding
    regions: tuple[Region, ...]  # in the order of the tensors
    is_staged: bool  # whether each region is received apart and copied into the parameter, since its values change

    @property
    def is_divisible(self) -> bool:
        """Whether it has the dims of its tensors, so that it can be sent in parts."""
        forms, dims = {r.part.form for r in self.regions}, {len(r.low) for r in self.regions}
        return dims == {len(self.shape)} and len(self.shape) > 1 and forms == {"transposed" if self.is_staged else ""}

    def axis_of(self, dim: int) -> int:
        """Return the dim of this parameter for a dim of its tensors."""
        return len(self.shape) - dim if self.is_staged and dim else dim


@dataclass(frozen=True, eq=False)
class Bundle:
    """Tensors of one group and the parameters that they fill, worker by worker."""

    tensors: tuple[int, ...]  # their numbers in the group
    by_kind: tuple[tuple[Parameter, ...], ...]  # the parameters of each kind of worker
    specs: Sequence[TensorSpec]  # of all tensors of the group
    senders: Sequence[Senders]  # of all tensors of the group
    may_split: bool  # whether it may be sent in parts
    by_rows: bool  # whether parts always divide dim 0, as for experts that are sent one by one

    @cached_property
    def part_dim(self) -> int:
        """The dim of its tensors that parts divide."""
        # Experts are divided along dim 1, because a part of few experts would come from few ranks.
        shape = self.specs[self.tensors[0]].shape
        return int(len(shape) == 3 and shape[1] > 1 and not self.by_rows)

    @cached_property
    def max_parts(self) -> int:
        parameters = list(itertools.chain(*self.by_kind))
        if not self.may_split or not all(p.is_divisible for p in parameters):
            return 1
        return max(p.shape[p.axis_of(self.part_dim)] for p in parameters)

    @cached_property
    def run(self) -> Run:
        return self._run(first=0)

    @cached_property
    def run_of_parts(self) -> Run:
        return self._run(first=self.part_dim + 1)

    @property
    def is_short(self) -> bool:
        """Whether its tensors are sent whole."""
        return self.run[0] < _SHORTEST_RUN and sum(self.specs[i].nbytes for i in self.tensors) <= _LARGEST_SHORT

    def _run(self, first: int) -> Run:
        found, dims = 0, {}
        for i in self.tensors:
            regions = [r for p in itertools.chain(*self.by_kind) for r in p.regions if r.tensor == i]
            dims[i], size = _contiguous(self.senders[i], self.specs[i].shape or (1,), regions, first)
            found = math.gcd(found, size * self.specs[i].itemsize)
        return found or 1, dims

    def sent(self, part: int = 0, parts: int = 1) -> Ints:
        """Return the bytes of a part that each rank sends to a worker of each kind, ``[ranks, kinds]``."""
        found = np.zeros((len(self.senders[self.tensors[0]].low), len(self.by_kind)), dtype=np.int64)
        for kind, parameters in enumerate(self.by_kind):
            for region in (r for p in parameters for r in p.regions if r.part.form != "zeros"):
                held, d = self.senders[region.tensor], self.part_dim if parts > 1 else 0
                first = int(region.at[d] - region.low[d]) - part
                low, high = np.maximum(held.low, region.low), np.minimum(held.high, region.high)
                sizes = np.maximum(high - low, 0)
                sizes[..., d] = np.maximum(-(-(high[..., d] + first) // parts) + (-low[..., d] - first) // parts, 0)
                found[:, kind] += np.prod(sizes, axis=2).sum(axis=1) * self.specs[region.tensor].itemsize
        return found

    @cached_property
    def whole_sizes(self) -> dict[int, int]:
        """By tensor, the most bytes that any rank sends if tensors are sent whole, padded to ``ALIGNMENT``."""
        boxes = {i: self.senders[i].high - self.senders[i].low for i in self.tensors}
        sizes = {i: int(b.prod(axis=2).sum(axis=1).max()) * self.specs[i].itemsize for i, b in boxes.items()}
        return {i: -(-size // ALIGNMENT) * ALIGNMENT for i, size in sizes.items()}


def _contiguous(
    held: Senders, shape: tuple[int, ...], regions: Sequence[Region], first: int
) -> tuple[tuple[int, int], int]:
    """Return the first dim that a run covers, from ``first`` on, the elements of its rows, and the run's elements."""
    has_elements = (held.high > held.low).all(axis=2)
    low, high, before = (a[has_elements] for a in (held.low, held.high, held.low - held.origin))
    shards = held.shard[np.any(has_elements, axis=1)]
    row = 1
    for d in reversed(range(len(shape))):
        cuts = [low[:, d], high[:, d], before[:, d], *([r.low[d], r.high[d], r.at[d]] for r in regions)]
        if d:
            cuts += [shards[:, d], [r.shape[d] for r in regions]]
        flat = np.concatenate([np.ravel(cut) for cut in cuts])
        if d > first and set(np.unique(flat)) <= {0, shape[d]}:
            row *= shape[d]
            continue
        if d < first:
            break
        return (d, row), int(np.gcd.reduce(flat)) * row
    return (first, row), row


def bundles_of(
    specs: Sequence[TensorSpec],
    senders: Sequence[Senders],
    slices: Sequence[Sequence[Sequence[TargetSlice]]],
    may_split: Sequence[bool],
    by_rows: bool,
) -> list[Bundle]:
    """Return the bundles of a group of tensors, in the order of their first tensors.

    ``slices`` are by kind of worker and by tensor, ``may_split`` by tensor.
    """
    first_of: dict[str, int] = {}
    bundle = list(range(len(specs)))  # by tensor, the number of the first tensor of its bundle
    for by_tensor in slices:
        for i, parts in enumerate(by_tensor):
            for name in {part.parameter for part in parts}:
                a, b = sorted((bundle[first_of.setdefault(name, i)], bundle[i]))
                bundle = [a if other == b else other for other in bundle]
    found = []
    for number in dict.fromkeys(bundle):
        tensors = tuple(i for i, other in enumerate(bundle) if other == number)
        by_kind = tuple(_parameters(specs, tensors, by_tensor) for by_tensor in slices)
        if any(by_kind):
            found.append(Bundle(tensors, by_kind, specs, senders, all(may_split[i] for i in tensors), by_rows))
    return found


def _parameters(
    specs: Sequence[TensorSpec], tensors: Sequence[int], by_tensor: Sequence[Sequence[TargetSlice]]
) -> tuple[Parameter, ...]:
    placed: dict[str, list[tuple[int, TargetSlice]]] = {}
    for i in tensors:
        for part in by_tensor[i]:
            placed.setdefault(part.parameter, []).append((i, part))
    found = []
    for name, parts in placed.items():
        is_staged = len({specs[i].itemsize for i, _ in parts}) > 1 or any(part.form for _, part in parts)
        shape = tuple(map(max, zip(*(part.end for _, part in parts), strict=True)))
        regions = tuple(_region(i, part, shape, is_staged) for i, part in parts)
        found.append(Parameter(name, shape, regions, is_staged))
    return tuple(found)


def _region(tensor: int, part: TargetSlice, shape: tuple[int, ...], is_staged: bool) -> Region:
    low, high = np.array(part.block.low or (0,)), np.array(part.block.high or (1,))
    if is_staged:
        return Region(tensor, low, high, np.zeros_like(low), part.block.shape or (1,), part)
    missing = len(low) - len(shape)  # leading dims of size 1 that the parameter lacks
    return Region(tensor, low, high, np.array((0,) * missing + part.at), (1,) * missing + shape, part)
