"""The elements of a tensor that each trainer rank sends, computed for all ranks at once with integer arrays.

Every element has one sender in each trainer replica. Ranks that hold the same part of a tensor send equal shares of it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...engine.topology.mesh import Topology
from ..layout.specs import TensorSpec

__all__ = ["Ints", "Senders", "senders_of"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Senders:
    """The boxes of a tensor that the ranks of one trainer replica send. A scalar counts as one row.

    A rank has several boxes if its shard consists of several (``ShardStep.split_factor``).
    """

    low: Ints  # ``[ranks, boxes, dims]``: a box has the elements ``low <= index < high`` and may be empty
    high: Ints
    origin: Ints  # ``[ranks, boxes, dims]``: an element's index minus this is its index in the rank's shard
    shard: Ints  # ``[ranks, dims]``: shape of the rank's shard


def _chunks(low: Ints, high: Ints, parts: int, index: Ints) -> tuple[Ints, Ints]:
    """Return the bounds of the ``index``-th of ``parts`` chunks (``index_ranges.chunk_range``)."""
    size = -(-(high - low) // parts)
    return np.minimum(low + index * size, high), np.minimum(low + (index + 1) * size, high)


def senders_of(tensor: TensorSpec, topology: Topology) -> Senders:
    """Compute the boxes from a tensor's sharding steps (``index_ranges.shard_ranges``)."""
    held, shape = [topology.coordinate(rank) for rank in range(topology.fsdp)], np.array(tensor.shape or (1,))
    coordinates = {step.axis: np.array([at[step.axis] for at in held]) for step in tensor.cuts}
    low = np.zeros((topology.fsdp, 1, len(shape)), dtype=np.int64)
    high = np.broadcast_to(shape, low.shape).copy()
    split = 0
    for step in tensor.cuts:
        d = step.dim
        if step.split_factor > 1:
            split, count = d, low.shape[1]
            low, high = (np.repeat(bound, step.split_factor, axis=1) for bound in (low, high))
            which = np.tile(np.arange(step.split_factor), count)
            low[..., d], high[..., d] = _chunks(low[..., d], high[..., d], step.split_factor, which)
        low[..., d], high[..., d] = _chunks(low[..., d], high[..., d], step.parts, coordinates[step.axis][:, None])
    sizes = high - low
    shard = sizes[:, 0].copy()
    shard[:, split] = sizes[..., split].sum(axis=1)
    origin = low.copy()
    origin[..., split] -= np.cumsum(sizes[..., split], axis=1) - sizes[..., split]
    ranks = np.arange(topology.fsdp)
    axes = np.stack([np.zeros_like(ranks), *coordinates.values()])
    if (copies := len(ranks) // np.unique(axes, axis=1).shape[1]) > 1:
        turn, d = np.empty_like(ranks), int(np.argmax(shape))
        turn[np.lexsort(axes)] = ranks % copies  # ranks with the same elements follow one another
        low[..., d], high[..., d] = _chunks(low[..., d], high[..., d], copies, turn[:, None])
    return Senders(low, high, origin, shard)
