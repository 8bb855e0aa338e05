"""The parameters of workers, and which blocks of which tensors fill them.

Tensors that fill the same parameter of any worker, such as those of queries, keys and values, are one ``Bundle``. It is
what a round sends: each worker gets its parameters of a bundle whole or, where they are too large, every n-th row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..layout.specs import TargetSlice, TensorSpec
from .senders import Ints, Senders

__all__ = ["ALIGNMENT", "Bundle", "LARGEST_SHORT", "Parameter", "Region", "bundles_of"]

# A tensor that is contiguous for fewer bytes than this in some message is sent whole, to all workers.
_SHORTEST_RUN = 64
LARGEST_SHORT = 4 << 20
"""Bytes of tensors that are sent in pieces however short these are."""
ALIGNMENT = 16
"""Bytes of which offsets in buffers are multiples, so that they can be viewed as any dtype."""


@dataclass(frozen=True)
class Region:
    """A block of a tensor and where it goes.

    Args:
        tensor: number of the tensor in its group.
        low, high: of the block, ``[dims]``; a scalar counts as one row.
        at: position of the block's first element in ``shape``, in the tensor's dims.
        shape: of the memory that the block goes to: the parameter or, where values change on their way, the block's
            own.
        part: the slice; its ``form`` says what is done with the values before they are stored.
    """

    tensor: int
    low: Ints
    high: Ints
    at: Ints
    shape: tuple[int, ...]
    part: TargetSlice


@dataclass(frozen=True)
class Parameter:
    """A parameter of one worker.

    Args:
        name: in the layer that the plan was made with.
        shape: without padding.
        itemsize: bytes of an element of the widest tensor that fills it.
        regions: in the order of the tensors.
        is_staged: whether the regions are received by themselves and written into the parameter after that.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    regions: tuple[Region, ...]
    is_staged: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def has_rows(self) -> bool:
        """Whether its rows are rows of the tensors, so that it can be sent in parts."""
        forms, dims = {r.part.form for r in self.regions}, {len(r.low) for r in self.regions}
        return dims == {len(self.shape)} and len(self.shape) > 1 and forms == {"transposed" if self.is_staged else ""}

    def rows(self, part: int, parts: int) -> int:
        """Rows of the ``part``-th of ``parts``: every ``parts``-th, from row ``part`` on."""
        return len(range(part, self.shape[0] if self.shape else 1, parts))


@dataclass(frozen=True)
class Bundle:
    """Tensors of one group and the parameters that they fill, worker by worker.

    Args:
        tensors: their numbers in the group.
        by_kind: the parameters of each kind of worker.
        specs, senders: of all tensors of the group.
        may_split: whether it may be sent in parts.
        largest_short: the most bytes of tensors that are sent whole.
    """

    tensors: tuple[int, ...]
    by_kind: tuple[tuple[Parameter, ...], ...]
    specs: Sequence[TensorSpec]
    senders: Sequence[Senders]
    may_split: bool
    largest_short: int

    @cached_property
    def max_parts(self) -> int:
        """The most parts that it can be sent in."""
        parameters = [p for of_kind in self.by_kind for p in of_kind]
        is_split = self.may_split and all(p.has_rows for p in parameters)
        return max((p.shape[0] for p in parameters), default=1) if is_split else 1

    @cached_property
    def run(self) -> tuple[int, dict[int, tuple[int, int]]]:
        """Bytes for which everything sent of it is contiguous at both ends.

        Returns:
            Bytes and, by tensor, the first dim that a run covers and the elements of that dim's rows.
        """
        return self._run(first=0)

    @cached_property
    def run_of_rows(self) -> tuple[int, dict[int, tuple[int, int]]]:
        """``run`` where it is sent in parts, which are single rows."""
        return self._run(first=1)

    @property
    def is_short(self) -> bool:
        """Whether its tensors are sent whole."""
        return self.run[0] < _SHORTEST_RUN and sum(self.specs[i].nbytes for i in self.tensors) <= self.largest_short

    def _run(self, first: int) -> tuple[int, dict[int, tuple[int, int]]]:
        found, dims = 0, {}
        for i in self.tensors:
            regions = [r for ps in self.by_kind for p in ps for r in p.regions if r.tensor == i]
            dims[i], size = _contiguous(self.senders[i], self.specs[i].shape or (1,), regions, first)
            found = math.gcd(found, size * self.specs[i].itemsize)
        return found or 1, dims

    def sent(self, part: int = 0, parts: int = 1) -> Ints:
        """Return the bytes that each rank sends to a worker of each kind in a part of it, ``[ranks, kinds]``."""
        found = np.zeros((len(self.senders[self.tensors[0]].low), len(self.by_kind)), dtype=np.int64)
        for kind, parameters in enumerate(self.by_kind):
            for region in (r for p in parameters for r in p.regions if r.part.form != "zeros"):
                held, row = self.senders[region.tensor], int(region.at[0] - region.low[0]) - part
                low, high = np.maximum(held.low, region.low), np.minimum(held.high, region.high)
                sizes = np.maximum(high - low, 0)
                sizes[..., 0] = np.maximum(-(-(high[..., 0] + row) // parts) + (-low[..., 0] - row) // parts, 0)
                found[:, kind] += np.prod(sizes, axis=2).sum(axis=1) * self.specs[region.tensor].itemsize
        return found

    @property
    def short_bytes(self) -> int:
        """The most bytes that any rank sends of its tensors, each padded."""
        sizes = (self.senders[i].numel.max() * self.specs[i].itemsize for i in self.tensors)
        return sum(int(-(-size // ALIGNMENT) * ALIGNMENT) for size in sizes)


def _contiguous(
    held: Senders, shape: tuple[int, ...], regions: Sequence[Region], first: int
) -> tuple[tuple[int, int], int]:
    """Find for how many elements a tensor is contiguous wherever it is cut.

    Args:
        first: the first dim that may be one of those that a run covers.

    Returns:
        The first dim that a run covers and the elements of its rows; and the elements of a run.
    """
    has_elements = (held.high > held.low).all(axis=2)
    low, high, before = (a[has_elements] for a in (held.low, held.high, held.low - held.origin))
    shards = held.shard[has_elements.any(axis=1)]
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
    may_split: Callable[[int], bool],
    largest_short: int,
) -> list[Bundle]:
    """Find the bundles of a group of tensors, in the order of their first tensors.

    Args:
        slices: by kind of worker and tensor, what it keeps.
        may_split: tells whether a tensor may be sent in parts.
        largest_short: see ``Bundle``.
    """
    first_of: dict[str, int] = {}
    bundle = list(range(len(specs)))  # by tensor, the number of its bundle's first one
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
            found.append(Bundle(tensors, by_kind, specs, senders, all(map(may_split, tensors)), largest_short))
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
        sizes = {specs[i].itemsize for i, _ in parts}
        is_staged = len(sizes) > 1 or any(part.form for _, part in parts)
        shape = tuple(max(ends) for ends in zip(*(part.end for _, part in parts), strict=True))
        regions = tuple(_region(i, part, shape, is_staged) for i, part in parts)
        found.append(Parameter(name, shape, max(sizes), regions, is_staged))
    return tuple(found)


def _region(tensor: int, part: TargetSlice, shape: tuple[int, ...], is_staged: bool) -> Region:
    low, high = (
        np.array(corner or (bound,), dtype=np.int64) for corner, bound in ((part.block.low, 0), (part.block.high, 1))
    )
    missing = len(low) - len(shape)  # leading dims of size 1 that the parameter lacks
    if is_staged:
        own = tuple(int(size) for size in high - low)
        at = np.zeros(len(low), dtype=np.int64)
        # Parts are rows of the parameter, which its dims but the last two share with the tensor.
        if part.form == "transposed":
            at[0] = part.at[0]
            own = (shape[0], *own[1:])
        return Region(tensor, low, high, at, own, part)
    at = np.array([0] * missing + list(part.at or (0,) * (len(low) - missing)), dtype=np.int64)
    return Region(tensor, low, high, at, (1,) * missing + (shape or (1,)) if missing >= 0 else shape, part)
