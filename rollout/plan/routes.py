"""One rank's work in a round: the positions of the rows that it sends, and of the rows that it receives.

They are computed once for each round of a template, so that a sync only gathers rows by position. A position counts
the round's ``unit`` of bytes. Both ends of a message use one order: shares, parameters, regions, the sender's boxes,
rows. Tensors that are sent whole come last, and their positions count words.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .parameters import ALIGNMENT, Parameter, Region
from .senders import Ints
from .transfer_plan import Round, Share, TransferPlan

__all__ = ["Arrival", "Member", "Route", "route_of"]

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Member:
    """A rank's role in a sync, and the roles of its group's ranks towards it."""

    source: int | None  # its number in its trainer replica; None if it sends nothing
    kind: int | None  # of its worker; None if it receives nothing
    targets: tuple[int, ...]  # for each rank of the group, the kind of its worker if this rank sends to it, else -1
    sources: tuple[int, ...]  # for each rank of the group, its number in the replica that sends to this rank, else -1

    @classmethod
    def of(cls, plan: TransferPlan, rank: int) -> "Member":
        """Describe a rank of a trainer replica or, with separate workers, of the one group of trainer and workers."""
        ranks, trainers, targets = plan.topology.fsdp, plan.topology.world, plan.targets
        replica, source = divmod(rank, ranks)
        if not targets.are_separate:
            kinds = targets.kinds[replica * ranks : (replica + 1) * ranks]
            return cls(source, kinds[source], kinds, tuple(range(ranks)))
        own = replica if rank < trainers else targets.replicas[rank - trainers]
        none = (-1,) * (trainers + len(targets.kinds))
        if rank < trainers:
            sends = (k if r == own else -1 for k, r in zip(targets.kinds, targets.replicas, strict=True))
            return cls(source, None, (*none[:trainers], *sends), none)
        receives = (i % ranks if i // ranks == own else -1 for i in range(trainers))
        return cls(None, targets.kinds[rank - trainers], none, (*receives, *none[trainers:]))


@dataclass(frozen=True)
class Copy:
    """A copy of a tensor's shard, or of ``inside`` it, to byte ``start`` of the rank's flat buffer."""

    tensor: int
    inside: tuple[slice, ...] | None
    start: int


@dataclass(frozen=True)
class Arrival:
    """A parameter, or a part of it, that a worker gets in a round."""

    share: Share
    parameter: Parameter
    number: int  # of the parameter in its bundle
    axis: int  # the dim of the parameter that parts divide
    shape: tuple[int, ...]  # of the part
    placed: tuple[tuple[Region, int], ...]  # its regions, each with the first byte of its memory in the round's buffer


@dataclass(frozen=True)
class Route:
    """A rank's copies, messages and parameters in a round."""

    copies: tuple[Copy, ...]  # to its flat buffer
    flat_bytes: int
    sent: Any  # positions in the flat buffer of the rows of all messages, in the order of the group's ranks
    sent_sizes: list[int]  # bytes of the message to each rank
    sent_bytes: int  # of all messages
    received: Any  # positions in the received messages of the rows of the round's buffer
    received_words: Any  # positions of the words that follow these rows: of tensors that are sent whole
    received_sizes: list[int]  # bytes of the message from each rank
    received_bytes: int  # of all messages
    nbytes: int  # of the round's buffer
    arrivals: tuple[Arrival, ...]


def route_of(round_: Round, member: Member, plan: TransferPlan) -> Route:
    """Compute a rank's route of a round."""
    copies, flat_bytes, sent, sent_sizes = _packing(round_, member)
    arrivals, at_words, nbytes = _arrivals(round_, member.kind)
    parts: list[tuple[int, int, Ints]] = []
    lengths = np.zeros(plan.topology.fsdp, dtype=np.int64)  # of the message of each sender so far, in units
    for arrival in arrivals:
        for region, start in () if arrival.share.is_whole else arrival.placed:
            for rank, rows in _received_rows(arrival.share, region, round_.unit):
                parts.append((rank, int(lengths[rank]), rows + start // round_.unit))
                lengths[rank] += len(rows)
    sources = np.array(member.sources)
    sizes = np.where(sources >= 0, (lengths + round_.whole_offsets[1] // round_.unit)[sources], 0)
    if plan.targets.are_gathered:  # an all-gather needs equal messages: pad to the longest
        sizes[:] = sizes.max()
        own = sent_sizes[0] // round_.unit
        sent = np.concatenate([sent[:own], np.zeros(sizes[0] - own, dtype=np.int64)])
        sent_sizes = [len(sent) * round_.unit]
    begins, received = np.zeros_like(lengths), np.zeros(at_words // round_.unit, dtype=np.int64)
    begins[sources[sources >= 0]] = (np.cumsum(sizes) - sizes)[sources >= 0]
    for number, begin, positions in parts:
        received[positions] = begins[number] + begin + np.arange(len(positions))
    words = _words(round_, arrivals, (begins + lengths) * round_.unit, at_words, nbytes)
    from_ranks = (sizes * round_.unit).tolist(), int(sizes.sum()) * round_.unit
    return Route(copies, flat_bytes, sent, sent_sizes, sum(sent_sizes), received, words, *from_ranks, nbytes, arrivals)


def _packing(round_: Round, member: Member) -> tuple[tuple[Copy, ...], int, Ints, list[int]]:
    """Return a trainer rank's copies, the bytes of its flat buffer, and the positions and sizes of its messages."""
    if member.source is None:
        return (), 0, _NONE, [0] * len(member.targets)
    rank, at, unit = member.source, 0, round_.unit
    copies: dict[tuple[int, str], Copy] = {}
    by_kind: dict[int, list[Ints]] = {kind: [] for kind in sorted({kind for kind in member.targets if kind >= 0})}
    for kind, found in by_kind.items():
        for share in (share for share in round_.shares if not share.is_whole):
            for region in (r for parameter in share.bundle.by_kind[kind] for r in parameter.regions):
                for box in range(share.bundle.senders[region.tensor].low.shape[1]):
                    inside, rows, size = _sent_rows(share, region, rank, box, unit)
                    if size:
                        key = region.tensor, str(inside)
                        if key not in copies:
                            copies[key] = Copy(region.tensor, inside, at)
                            at = _up(at + size, round_.alignment)
                        found.append(rows + copies[key].start // unit)
    (offsets, whole_bytes), whole = round_.whole_offsets, []
    for i, start in offsets.items():
        held, to = round_.shares[0].bundle.senders[i], at + start
        for low, high, origin in zip(held.low[rank], held.high[rank], held.origin[rank], strict=True):
            if (high > low).all():
                whole.append(Copy(i, tuple(map(slice, (low - origin).tolist(), (high - origin).tolist())), to))
                to += int((high - low).prod()) * round_.specs[i].itemsize
    shared = np.arange(at, at + whole_bytes, unit) // unit
    joined = {kind: np.concatenate([*found, shared]) for kind, found in by_kind.items()}
    messages = [joined.get(kind, _NONE) for kind in member.targets]
    sizes = [len(rows) * unit for rows in messages]
    return (*copies.values(), *whole), max(at + whole_bytes, unit), np.concatenate([*messages, _NONE]), sizes


def _arrivals(round_: Round, kind: int | None) -> tuple[tuple[Arrival, ...], int, int]:
    """Return a worker's arrivals, the first byte of tensors sent whole in its buffer, and the buffer's bytes."""
    if kind is None:
        return (), 0, 0
    found, at, at_words = [], 0, 0
    for share in round_.shares:
        alignment, d = ALIGNMENT if share.is_whole else round_.alignment, share.bundle.part_dim
        for number, parameter in enumerate(share.bundle.by_kind[kind]):
            placed: list[tuple[Region, int]] = []
            for region in parameter.regions:
                placed.append((region, at if parameter.is_staged or not placed else placed[0][1]))
                size = math.prod(share.part_of(region.shape, d)) * round_.specs[region.tensor].itemsize
                at = _up(placed[-1][1] + size, alignment)
            axis = parameter.axis_of(d)
            shape = share.part_of(parameter.shape, axis)
            found.append(Arrival(share, parameter, number, axis, shape, tuple(placed)))
        at_words = at_words if share.is_whole else at
    return tuple(found), at_words, at


def _words(round_: Round, arrivals: Sequence[Arrival], starts: Ints, first: int, end: int) -> Ints:
    """Return the positions in the received messages of the words of tensors that are sent whole.

    These words begin at byte ``starts[rank]`` of a message, and fill bytes ``first`` to ``end`` of the round's buffer.
    """
    if not arrivals:
        return _NONE
    word, grids = round_.word, {}
    for i, offset in round_.whole_offsets[0].items():
        held, each = round_.shares[0].bundle.senders[i], round_.specs[i].itemsize // word
        grids[i] = np.zeros((*(round_.specs[i].shape or (1,)), each), dtype=np.int64)
        for rank, start in enumerate((starts + offset) // word):
            for low, high in zip(held.low[rank], held.high[rank], strict=True):
                numbers = np.arange(start, start + (high - low).prod() * each)
                grids[i][tuple(map(slice, low, high))] = numbers.reshape(*(high - low), each)
                start += len(numbers)
    found = np.zeros((end - first) // word, dtype=np.int64)
    for arrival in arrivals:
        for region, start in arrival.placed if arrival.share.is_whole else ():
            if region.part.form != "zeros":
                shape = (*region.shape, grids[region.tensor].shape[-1])
                memory = found[(start - first) // word :][: math.prod(shape)].reshape(shape)
                into = tuple(map(slice, region.at, region.at + region.high - region.low))
                memory[into] = grids[region.tensor][tuple(map(slice, region.low, region.high))]
    return found


def _sent_rows(
    share: Share, region: Region, rank: int, box: int, unit: int
) -> tuple[tuple[slice, ...] | None, Ints, int]:
    """Return ``Copy.inside`` for a region, the positions of the sent rows in the copy, and the copy's bytes.

    The copy is the whole shard, which other regions share, unless a share is one of several parts.
    """
    held, (dim, row) = share.bundle.senders[region.tensor], share.run[1][region.tensor]
    itemsize, d, origin = share.bundle.specs[region.tensor].itemsize, share.bundle.part_dim, held.origin[rank, box]
    low, high = np.maximum(held.low[rank, box], region.low), np.minimum(held.high[rank, box], region.high)
    kept = _of_part(share, region, low, high)
    if region.part.form == "zeros" or (high <= low).any() or not kept:
        return None, _NONE, 0
    shard, inside, low, high = tuple(map(int, held.shard[rank])), None, low - origin, high - origin
    if share.parts > 1:
        inside = (*[slice(None)] * d, slice(kept[0] - int(origin[d]), kept[-1] + 1 - int(origin[d]), share.parts))
        low[d], high[d], shard = 0, len(kept), (*shard[:d], len(kept), *shard[d + 1 :])
    length = unit // itemsize
    return inside, _cut(_runs(shard, dim, row, length), low, high, row, length), math.prod(shard) * itemsize


def _received_rows(share: Share, region: Region, unit: int) -> Iterator[tuple[int, Ints]]:
    """Yield each rank that sends rows of a region, and their positions in the region's memory."""
    held, (dim, row) = share.bundle.senders[region.tensor], share.run[1][region.tensor]
    d, length, to = share.bundle.part_dim, unit // share.bundle.specs[region.tensor].itemsize, region.at - region.low
    runs = _runs(share.part_of(region.shape, d), dim, row, length)
    lows, highs = np.maximum(held.low, region.low), np.minimum(held.high, region.high)
    for rank, box in np.argwhere((highs > lows).all(axis=2)) if region.part.form != "zeros" else ():
        kept = _of_part(share, region, lows[rank, box], highs[rank, box])
        low, high = lows[rank, box] + to, highs[rank, box] + to
        if share.parts > 1:
            low[d] = (kept.start + to[d]) // share.parts
            high[d] = low[d] + len(kept)
        yield int(rank), _cut(runs, low, high, row, length)


def _of_part(share: Share, region: Region, low: Ints, high: Ints) -> range:
    """Return the indices of a box in a share, along the dim that parts divide."""
    d = share.bundle.part_dim
    before = (share.part - int(low[d] - region.low[d] + region.at[d])) % share.parts
    return range(int(low[d]) + before, int(high[d]), share.parts)


def _runs(shape: tuple[int, ...], dim: int, row: int, length: int) -> Ints:
    """Number the runs of ``length`` elements in memory of this shape; rows of ``dim`` have ``row`` elements."""
    shape = (*shape[:dim], shape[dim] * row // length)
    return np.arange(math.prod(shape)).reshape(shape)


def _cut(runs: Ints, low: Ints, high: Ints, row: int, length: int) -> Ints:
    """Return the numbers of a box's runs."""
    *outer, last = zip(low[: runs.ndim], high[: runs.ndim], strict=True)
    bounds = (*outer, (last[0] * row // length, last[1] * row // length))
    return runs[tuple(slice(*bound) for bound in bounds)].reshape(-1)


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
