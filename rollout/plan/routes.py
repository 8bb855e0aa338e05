"""What one rank does in a round: positions of what it sends among its own values, and of what it receives.

All of it is computed once for each round of a template, so that a sync only gathers rows by these positions. A position
counts the round's ``unit`` of bytes. Both ends of a message agree on its order: shares, parameters, regions, the
sender's boxes, and in each box rows.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .parameters import Bundle, Region
from .senders import Ints, Senders
from .transfer_plan import Round, Share, TransferPlan

__all__ = ["Arrival", "Member", "Piece", "Route", "route_of"]

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Member:
    """A rank's part in a sync, and those of the other ranks of its group."""

    source: int | None  # its number in its trainer replica; None where it sends nothing
    kind: int | None  # of its worker; None where it receives nothing
    targets: tuple[int, ...]  # for each rank of the group, the kind of its worker if this rank sends to it, else -1
    sources: tuple[int, ...]  # for each rank of the group, its number in the replica that sends to this rank, else -1

    @classmethod
    def of(cls, plan: TransferPlan, rank: int) -> "Member":
        """Describe a trainer rank, whose group is its replica; or a rank of the group with workers of their own."""
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
    """A tensor's values that a rank copies to its flat buffer: all of its shard, or those at ``inside``."""

    tensor: int
    inside: tuple[slice, ...] | None
    start: int


@dataclass(frozen=True)
class Piece:
    """Where a parameter's values, or those of one of its regions, are among what a rank has received."""

    region: Region | None  # None for the whole parameter
    shape: tuple[int, ...]
    start: int = 0  # their first byte
    # Of what is sent whole, the positions of their elements in what all ranks have sent of that; an array, or a tensor
    # once they are on a device.
    elements: Any = None


@dataclass(frozen=True)
class Arrival:
    """A parameter, or a part of it, that a worker gets in a round."""

    bundle: Bundle
    number: int  # of the parameter among those of its bundle
    axis: int  # the dim of the parameter that parts divide
    part: int
    parts: int
    shape: tuple[int, ...]  # of the part that comes
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Route:
    """What a rank copies, sends, receives and gets in a round."""

    copies: tuple[Copy, ...]  # to its flat buffer
    flat_bytes: int
    sent: Any  # positions in that of the rows of all its messages, in the order of the group's ranks
    sent_sizes: list[int]  # bytes of the message to each rank
    received: Any  # positions in the received messages of the rows of the round's buffer
    received_sizes: list[int]  # bytes of the message from each rank
    nbytes: int  # of the round's buffer
    short: int  # where in that begins what ranks have sent whole
    arrivals: tuple[Arrival, ...]


def route_of(round_: Round, member: Member, plan: TransferPlan) -> Route:
    """Compute a rank's part in a round."""
    unit = round_.unit
    copies, flat_bytes, sent, sent_sizes = _packing(round_, member)
    rows, sizes, short, arrivals = _unpacking(round_, member, plan.topology.fsdp)
    nbytes = len(rows) * unit
    if plan.targets.are_gathered:  # one message for all, as long as the longest of any rank
        lengths, most, own = np.array(sizes) // unit, max(sizes) // unit, sent_sizes[0] // unit
        ends = np.cumsum(lengths)
        source = np.searchsorted(ends, rows, side="right")
        rows = rows - (ends - lengths)[source] + source * most
        sent = np.concatenate([sent[:own], np.zeros(most - own, dtype=np.int64)])
        sizes, sent_sizes = [most * unit] * len(sizes), [most * unit]
    return Route(copies, flat_bytes, sent, sent_sizes, rows, sizes, nbytes, short, arrivals)


def _packing(round_: Round, member: Member) -> tuple[tuple[Copy, ...], int, Ints, list[int]]:
    """Return what a trainer rank copies, its bytes, and the positions and sizes of its messages."""
    if member.source is None:
        return (), 0, _NONE, [0] * len(member.targets)
    rank, at, unit = member.source, 0, round_.unit
    copies: dict[tuple[object, ...], Copy] = {}
    by_kind: dict[int, list[Ints]] = {kind: [] for kind in sorted({kind for kind in member.targets if kind >= 0})}
    for kind, found in by_kind.items():
        for share in round_.long:
            for region in (r for parameter in share.bundle.by_kind[kind] for r in parameter.regions):
                for box in range(share.bundle.senders[region.tensor].low.shape[1]):
                    inside, rows, size = _sent_rows(share, region, rank, box, unit)
                    if size:
                        key = id(share.bundle), region.tensor, str(inside)
                        if key not in copies:
                            copies[key] = Copy(region.tensor, inside, at)
                            at = _up(at + size, round_.alignment)
                        found.append(rows + copies[key].start // unit)
    (offsets, short_bytes), whole = round_.short_offsets, []
    for bundle, i in ((b, i) for b in round_.short for i in b.tensors):
        to = at + int(offsets[i][rank])
        for inside, numel in _own_boxes(bundle.senders[i], rank):
            whole.append(Copy(i, inside, to))
            to += numel * bundle.specs[i].itemsize
    shared = np.arange(at, at + short_bytes, unit) // unit
    joined = {kind: np.concatenate([*found, shared]) for kind, found in by_kind.items()}
    messages = [joined.get(kind, _NONE) for kind in member.targets]
    sizes = [len(rows) * unit for rows in messages]
    return (*copies.values(), *whole), max(at + short_bytes, unit), np.concatenate([*messages, _NONE]), sizes


def _unpacking(round_: Round, member: Member, ranks: int) -> tuple[Ints, list[int], int, tuple[Arrival, ...]]:
    """Return the positions of the rows of a rank's buffer in the messages, their sizes, and what is where in it."""
    if member.kind is None:
        return _NONE, [0] * len(member.sources), 0, ()
    unit, at, arrivals = round_.unit, 0, []
    lengths = np.zeros(ranks, dtype=np.int64)  # of the message of each sender so far, in units
    parts: list[tuple[int, int, Ints]] = []
    for share in round_.long:
        for number, parameter in enumerate(share.bundle.by_kind[member.kind]):
            axis = parameter.axis_of(share.bundle.part_dim)
            shape = share.part_of(parameter.shape, axis)
            pieces = [] if parameter.is_staged else [Piece(None, shape, at)]
            if pieces:
                at = _up(at + math.prod(shape) * parameter.itemsize, round_.alignment)
            for region in parameter.regions:
                if parameter.is_staged:
                    pieces.append(Piece(region, share.part_of(region.shape, share.bundle.part_dim), at))
                    size = math.prod(pieces[-1].shape) * share.bundle.specs[region.tensor].itemsize
                    at = _up(at + size, round_.alignment)
                for rank, rows in _received_rows(share, region, unit):
                    parts.append((rank, int(lengths[rank]), rows + pieces[-1].start // unit))
                    lengths[rank] += len(rows)
            arrivals.append(Arrival(share.bundle, number, axis, share.part, share.parts, shape, tuple(pieces)))
    each = round_.short_offsets[1] // unit
    for rank in range(ranks if each else 0):
        parts.append((rank, int(lengths[rank]), np.arange(rank * each, (rank + 1) * each) + at // unit))
        lengths[rank] += each
    place = {number: rank for rank, number in enumerate(member.sources) if number >= 0}
    by_rank = np.zeros(len(member.sources) + 1, dtype=np.int64)
    for number, rank in place.items():
        by_rank[rank + 1] = lengths[number]
    begins, found = np.cumsum(by_rank), np.zeros(at // unit + ranks * each, dtype=np.int64)
    for number, begin, positions in parts:
        found[positions] = begins[place[number]] + begin + np.arange(len(positions))
    return found, (by_rank[1:] * unit).tolist(), at, (*arrivals, *_short_arrivals(round_, member.kind))


def _sent_rows(
    share: Share, region: Region, rank: int, box: int, unit: int
) -> tuple[tuple[slice, ...] | None, Ints, int]:
    """Return what a rank copies of its shard to send a region, the positions of what it sends of that, and its bytes.

    It copies the whole shard, which others need too, unless a share is one of several parts.
    """
    held, (dim, row) = share.bundle.senders[region.tensor], share.run[1][region.tensor]
    itemsize, d, origin = share.bundle.specs[region.tensor].itemsize, share.bundle.part_dim, held.origin[rank, box]
    low, high = np.maximum(held.low[rank, box], region.low), np.minimum(held.high[rank, box], region.high)
    kept = _of_part(share, region, low, high)[0] - origin[d]
    if region.part.form == "zeros" or (high <= low).any() or not len(kept):
        return None, _NONE, 0
    shard, inside = tuple(map(int, held.shard[rank])), None
    if share.parts > 1:
        inside = (*[slice(None)] * d, slice(int(kept[0]), int(kept[-1]) + 1, share.parts))
        kept, shard = np.arange(len(kept)), (*shard[:d], len(kept), *shard[d + 1 :])
    rows = _positions(low - origin, high - origin, shard, dim, row, unit // itemsize, (d, kept))
    return inside, rows, math.prod(shard) * itemsize


def _received_rows(share: Share, region: Region, unit: int) -> Iterator[tuple[int, Ints]]:
    """Yield each rank that sends something of a region, and the positions of that in the region's memory."""
    held, (dim, row) = share.bundle.senders[region.tensor], share.run[1][region.tensor]
    d, length, to = share.bundle.part_dim, unit // share.bundle.specs[region.tensor].itemsize, region.at - region.low
    shape = share.part_of(region.shape, d)
    for rank, _, low, high in _shared(held, region):
        kept = _of_part(share, region, low, high)[1]
        yield rank, _positions(low + to, high + to, shape, dim, row, length, (d, kept))


def _shared(held: Senders, region: Region) -> Iterator[tuple[int, int, Ints, Ints]]:
    """Yield each rank and box that has some of a region, and the bounds of that."""
    low, high = np.maximum(held.low, region.low), np.minimum(held.high, region.high)
    for rank, box in np.argwhere((high > low).all(axis=2)) if region.part.form != "zeros" else ():
        yield int(rank), int(box), low[rank, box], high[rank, box]


def _of_part(share: Share, region: Region, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Return those indices of a box, along the dim that parts divide, that are in a share; and theirs in what comes."""
    d = share.bundle.part_dim
    indices = np.arange(low[d], high[d])
    at = indices - region.low[d] + region.at[d]
    is_in = at % share.parts == share.part
    return indices[is_in], at[is_in] // share.parts


def _positions(
    low: Ints, high: Ints, shape: Sequence[int], dim: int, row: int, length: int, kept: tuple[int, Ints] = (-1, _NONE)
) -> Ints:
    """Return the positions of a box's runs of ``length`` elements in contiguous memory, in the order of its rows.

    Args:
        low, high: the box, in the memory's dims.
        shape: of the memory.
        dim, row: the dim that runs are cut from, and the elements of its rows.
        kept: a dim, and which of its indices are in a share.
    """
    strides, found = np.cumprod((1, *reversed(shape[1:])))[::-1], np.zeros(1, dtype=np.int64)
    for d in range(dim):
        indices = kept[1] if kept[0] == d else np.arange(low[d], high[d])
        found = (found[:, None] + indices * strides[d]).reshape(-1)
    return (found[:, None] + np.arange(low[dim] * row, high[dim] * row, length)).reshape(-1) // length


def _own_boxes(held: Senders, rank: int) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Yield the indices in a rank's shard of each box that it sends, and its elements."""
    for low, high, origin in zip(held.low[rank], held.high[rank], held.origin[rank], strict=True):
        if (high > low).all():
            yield tuple(map(slice, (low - origin).tolist(), (high - origin).tolist())), int((high - low).prod())


def _short_arrivals(round_: Round, kind: int) -> Iterator[Arrival]:
    """Yield the parameters of bundles that are sent whole, with the positions of their elements."""
    for bundle in round_.short:
        for number, parameter in enumerate(bundle.by_kind[kind]):
            regions, shape = parameter.regions, parameter.shape
            if parameter.is_staged:
                pieces = [Piece(r, r.shape, elements=_elements(round_, bundle, r.shape, [r])) for r in regions]
            else:
                pieces = [Piece(None, shape, elements=_elements(round_, bundle, shape, regions))]
            yield Arrival(bundle, number, 0, 0, 1, shape, tuple(pieces))


def _elements(round_: Round, bundle: Bundle, shape: tuple[int, ...], regions: Iterable[Region]) -> Ints:
    """Return the positions of the elements of these regions in what all ranks have sent whole."""
    offsets, nbytes = round_.short_offsets
    found = np.zeros(math.prod(shape), dtype=np.int64)
    for region in regions:
        held, itemsize, last = bundle.senders[region.tensor], bundle.specs[region.tensor].itemsize, len(region.low) - 1
        sizes = np.prod(np.maximum(held.high - held.low, 0), axis=2)
        before, to = np.cumsum(sizes, axis=1) - sizes, region.at - region.low
        for rank, box, low, high in _shared(held, region):
            origin, start = held.low[rank, box], rank * nbytes + offsets[region.tensor][rank]
            own = _positions(low - origin, high - origin, held.high[rank, box] - origin, last, 1, 1)
            into = _positions(low + to, high + to, region.shape, last, 1, 1)
            found[into] = start // itemsize + before[rank, box] + own
    return found


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
