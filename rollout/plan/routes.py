"""What one rank does in a round: positions of what it sends among its own values, and of what it receives.

All of it is computed once for each round of a template, so that a sync only gathers rows by these positions. A position
counts the round's ``unit`` of bytes. Both ends of a message agree on its order: shares, parameters, regions, the
sender's boxes, and in each box rows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .parameters import Bundle, Region
from .senders import Ints, Senders
from .transfer_plan import Round, Share, TransferPlan

__all__ = ["Arrival", "Member", "Packing", "Placement", "Unpacking", "pack_positions", "unpack_positions"]


@dataclass(frozen=True)
class Member:
    """A rank's part in a sync, and that of the other ranks of its group.

    Args:
        source: its number in its trainer replica; None where it sends nothing.
        kind: of its worker; None where it receives nothing.
        targets: for each rank of the group, the kind of its worker if this rank sends to it, else -1.
        sources: for each rank of the group, its number in the trainer replica that sends to this rank, else -1.
    """

    source: int | None
    kind: int | None
    targets: tuple[int, ...]
    sources: tuple[int, ...]

    @classmethod
    def colocated(cls, plan: TransferPlan, replica: int, rank: int) -> "Member":
        """Describe a rank of a trainer replica, all of which feed workers beside them."""
        ranks = plan.topology.fsdp
        kinds = plan.targets.kinds[replica * ranks : (replica + 1) * ranks]
        return cls(rank, kinds[rank], kinds, tuple(range(ranks)))

    @classmethod
    def separate(cls, plan: TransferPlan, rank: int) -> "Member":
        """Describe a rank of a group of all trainer ranks and, after them, of the workers."""
        topology, targets = plan.topology, plan.targets
        trainers = topology.world
        own = rank // topology.fsdp if rank < trainers else targets.replicas[rank - trainers]
        sends = [k if r == own else -1 for k, r in zip(targets.kinds, targets.replicas, strict=True)]
        receives = [i % topology.fsdp if i // topology.fsdp == own else -1 for i in range(trainers)]
        if rank < trainers:
            return cls(rank % topology.fsdp, None, (*[-1] * trainers, *sends), (-1,) * (trainers + len(sends)))
        kind = targets.kinds[rank - trainers]
        return cls(None, kind, (-1,) * (trainers + len(sends)), (*receives, *[-1] * len(sends)))


@dataclass(frozen=True)
class Packing:
    """How a rank fills its messages of a round.

    Args:
        values: number of each tensor that is needed, the indices in its shard of what is needed (none for all of it),
            and where its bytes begin in the rank's flat buffer.
        nbytes: size of that buffer.
        rows: positions in it of the rows of all messages, in the order of the group's ranks.
        sizes: bytes of the message to each rank.
    """

    values: tuple[tuple[int, tuple[slice, ...] | None, int], ...]
    nbytes: int
    rows: Ints
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A region of a staged parameter: where it is received, and its shape there."""

    region: Region
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Arrival:
    """A parameter, or a part of it, that a worker gets in a round.

    Args:
        number: of the parameter among those of its bundle.
        axis: the dim of the parameter that parts divide.
        shape: of the part that comes.
        start: its first byte in the round's buffer, for one that is sent in pieces and not staged.
        placements: of the regions of one that is staged.
        elements: for one of a short bundle, the positions of its elements in what all ranks have sent of it; of each
            region where it is staged.
    """

    bundle: Bundle
    number: int
    axis: int
    part: int
    parts: int
    shape: tuple[int, ...]
    start: int = 0
    placements: tuple[Placement, ...] = ()
    elements: tuple[Ints, ...] = ()


@dataclass(frozen=True)
class Unpacking:
    """How a rank finds its worker's parameters in what it has received.

    Args:
        rows: positions in the received messages of the rows of the round's buffer.
        sizes: bytes of the message from each rank.
        nbytes: size of the round's buffer.
        short: where in it begins what the ranks have sent whole.
    """

    rows: Ints
    sizes: tuple[int, ...]
    nbytes: int
    short: int
    arrivals: tuple[Arrival, ...]


def pack_positions(round_: Round, member: Member) -> Packing:
    """Compute how a trainer rank packs a round."""
    assert member.source is not None
    rank, values, at = member.source, [], 0
    starts: dict[tuple[object, ...], int] = {}
    by_kind: dict[int, list[Ints]] = {kind: [] for kind in sorted({kind for kind in member.targets if kind >= 0})}
    for kind, found in by_kind.items():
        for share, region in _regions(round_.long, kind):
            for box in range(share.bundle.senders[region.tensor].low.shape[1]):
                inside, rows, size = _sent_rows(share, region, rank, box, round_.unit)
                key = id(share.bundle), region.tensor, str(inside)
                if size and key not in starts:
                    starts[key] = at
                    values.append((region.tensor, inside, at))
                    at = _up(at + size, round_.alignment)
                found += [rows + starts[key] // round_.unit] if size else []
    offsets, short_bytes = round_.short_offsets
    short, column = at, 0
    for bundle in round_.short:
        for i in bundle.tensors:
            to = short + int(offsets[rank, column])
            for inside, numel in _own_boxes(bundle.senders[i], rank):
                values.append((i, inside, to))
                to += numel * bundle.specs[i].itemsize
            column += 1
    shared, none = np.arange(short, short + short_bytes, round_.unit) // round_.unit, np.zeros(0, dtype=np.int64)
    joined = {kind: np.concatenate([*found, shared]) for kind, found in by_kind.items()}
    messages = [joined.get(kind, none) for kind in member.targets]
    sizes = tuple(len(rows) * round_.unit for rows in messages)
    return Packing(tuple(values), short + short_bytes, np.concatenate(messages or [none]), sizes)


def unpack_positions(round_: Round, member: Member, ranks: int) -> Unpacking:
    """Compute how a rank unpacks what ``ranks`` trainer ranks send for its worker in a round."""
    assert member.kind is not None
    unit, at, arrivals = round_.unit, 0, []
    lengths = np.zeros(ranks, dtype=np.int64)  # of the message of each sender so far, in units
    pieces: list[tuple[int, int, Ints]] = []
    for share in round_.long:
        for number, parameter in enumerate(share.bundle.by_kind[member.kind]):
            dim = share.bundle.part_dim
            shape = parameter.shape_of_part(dim, share.part, share.parts)
            start, placements = at, []
            if not parameter.is_staged:
                at = _up(at + math.prod(shape) * parameter.itemsize, round_.alignment)
            for region in parameter.regions:
                first = start
                if parameter.is_staged:
                    own = share.part_of(region.shape)
                    first, size = at, math.prod(own) * share.bundle.specs[region.tensor].itemsize
                    at = _up(at + size, round_.alignment)
                    placements.append(Placement(region, first, own))
                for rank, rows in _received_rows(share, region, unit):
                    pieces.append((rank, int(lengths[rank]), rows + first // unit))
                    lengths[rank] += len(rows)
            axis, placed = parameter.axis_of(dim), tuple(placements)
            arrivals.append(Arrival(share.bundle, number, axis, share.part, share.parts, shape, start, placed))
    _, short_bytes = round_.short_offsets
    short, each = at, short_bytes // unit
    for rank in range(ranks if short_bytes else 0):
        pieces.append((rank, int(lengths[rank]), np.arange(rank * each, (rank + 1) * each) + short // unit))
        lengths[rank] += each
    arrivals += _short_arrivals(round_, member.kind)
    by_rank = np.zeros(len(member.sources) + 1, dtype=np.int64)
    place = {number: rank for rank, number in enumerate(member.sources) if number >= 0}
    for number, rank in place.items():
        by_rank[rank + 1] = lengths[number]
    begins = np.cumsum(by_rank)
    rows = np.zeros((short + ranks * short_bytes) // unit, dtype=np.int64)
    for number, begin, positions in pieces:
        rows[positions] = begins[place[number]] + begin + np.arange(len(positions))
    sizes = tuple(int(size) for size in by_rank[1:] * unit)
    return Unpacking(rows, sizes, len(rows) * unit, short, tuple(arrivals))


def _regions(shares: Sequence[Share], kind: int) -> Iterator[tuple[Share, Region]]:
    for share in shares:
        for parameter in share.bundle.by_kind[kind]:
            for region in parameter.regions:
                yield share, region


def _shared(held: Senders, region: Region) -> tuple[Ints, Ints, Ints]:
    """Return the bounds of what each box has of a region, and the rank and box of those that have any."""
    low, high = np.maximum(held.low, region.low), np.minimum(held.high, region.high)
    return low, high, np.argwhere((high > low).all(axis=2))


def _sent_rows(
    share: Share, region: Region, rank: int, box: int, unit: int
) -> tuple[tuple[slice, ...] | None, Ints, int]:
    """Return what a rank copies of its shard to send a region, the positions of what it sends of that, and its bytes.

    It copies the whole shard, which others need too, unless a share is one of several parts.
    """
    held, (dim, row) = share.bundle.senders[region.tensor], share.run[1][region.tensor]
    itemsize, d = share.bundle.specs[region.tensor].itemsize, share.bundle.part_dim
    low, high = np.maximum(held.low[rank, box], region.low), np.minimum(held.high[rank, box], region.high)
    kept = _of_part(share, region, low, high)[0] - held.origin[rank, box, d]
    if region.part.form == "zeros" or (high <= low).any() or not len(kept):
        return None, np.zeros(0, dtype=np.int64), 0
    origin, shard, inside = held.origin[rank, box], tuple(map(int, held.shard[rank])), None
    if share.parts > 1:
        inside = (*[slice(None)] * d, slice(int(kept[0]), int(kept[-1]) + 1, share.parts))
        kept, shard = np.arange(len(kept)), (*shard[:d], len(kept), *shard[d + 1 :])
    rows = _positions(low - origin, high - origin, shard, dim, row, unit // itemsize, share, kept)
    return inside, rows, math.prod(shard) * itemsize


def _received_rows(share: Share, region: Region, unit: int) -> Iterator[tuple[int, Ints]]:
    """Yield each rank that sends something of a region, and the positions of that in the region's memory."""
    if region.part.form == "zeros":
        return
    held, (dim, row) = share.bundle.senders[region.tensor], share.run[1][region.tensor]
    low, high, boxes = _shared(held, region)
    length, shape = unit // share.bundle.specs[region.tensor].itemsize, share.part_of(region.shape)
    to = region.at - region.low
    for rank, box in boxes:
        own_low, own_high = low[rank, box], high[rank, box]
        kept = _of_part(share, region, own_low, own_high)[1]
        yield int(rank), _positions(own_low + to, own_high + to, shape, dim, row, length, share, kept)


def _of_part(share: Share, region: Region, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Return those indices of a box, along the dim that parts divide, that are in a share; and theirs in what comes."""
    d = share.bundle.part_dim
    indices = np.arange(low[d], high[d])
    at = indices - region.low[d] + region.at[d]
    is_in = at % share.parts == share.part
    return indices[is_in], at[is_in] // share.parts


def _positions(
    low: Ints,
    high: Ints,
    shape: Sequence[int],
    dim: int,
    row: int,
    length: int,
    share: Share | None = None,
    kept: Ints | None = None,
) -> Ints:
    """Return the positions of a box's runs of ``length`` elements in contiguous memory, in the order of its rows.

    Args:
        low, high: the box, in the memory's dims.
        shape: of the memory.
        dim, row: the dim that runs are cut from, and the elements of its rows.
        share, kept: where it is one of several parts, the indices along the dim that these divide.
    """
    strides, found = np.cumprod((1, *reversed(shape[1:])))[::-1], np.zeros(1, dtype=np.int64)
    for d in range(dim):
        indices = np.arange(low[d], high[d])
        if share is not None and kept is not None and share.parts > 1 and d == share.bundle.part_dim:
            indices = kept
        found = (found[:, None] + indices * strides[d]).reshape(-1)
    return (found[:, None] + np.arange(low[dim] * row, high[dim] * row, length)).reshape(-1) // length


def _own_boxes(held: Senders, rank: int) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Yield the indices in a rank's shard of each box that it sends, and its elements."""
    for low, high, origin in zip(held.low[rank], held.high[rank], held.origin[rank], strict=True):
        if (high > low).all():
            yield (
                tuple(slice(int(a), int(b)) for a, b in zip(low - origin, high - origin, strict=True)),
                int((high - low).prod()),
            )


def _short_arrivals(round_: Round, kind: int) -> Iterator[Arrival]:
    """Yield the parameters of bundles that are sent whole, with the positions of their elements."""
    offsets, nbytes = round_.short_offsets
    column = {(id(bundle), i): c for c, (bundle, i) in enumerate((b, i) for b in round_.short for i in b.tensors)}
    for bundle in round_.short:
        for number, parameter in enumerate(bundle.by_kind[kind]):
            found = [
                _elements(bundle, region, offsets[:, column[id(bundle), region.tensor]], nbytes)
                for region in parameter.regions
            ]
            if not parameter.is_staged:
                whole = np.zeros(math.prod(parameter.shape), dtype=np.int64)
                for positions, sources in found:
                    whole[positions] = sources
                yield Arrival(bundle, number, 0, 0, 1, parameter.shape, elements=(whole,))
                continue
            staged = []
            for region, (positions, sources) in zip(parameter.regions, found, strict=True):
                own = np.zeros(math.prod(region.shape), dtype=np.int64)
                own[positions] = sources
                staged.append(own)
            placements = tuple(Placement(region, 0, region.shape) for region in parameter.regions)
            yield Arrival(bundle, number, 0, 0, 1, parameter.shape, 0, placements, tuple(staged))


def _elements(bundle: Bundle, region: Region, offsets: Ints, nbytes: int) -> tuple[Ints, Ints]:
    """Return the positions of a region's elements in its memory, and in the ``nbytes`` that each rank has sent."""
    held, itemsize = bundle.senders[region.tensor], bundle.specs[region.tensor].itemsize
    low, high, boxes = _shared(held, region)
    sizes = np.prod(np.maximum(held.high - held.low, 0), axis=2)
    before = np.cumsum(sizes, axis=1) - sizes
    dims = len(region.low)
    positions, sources = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for rank, box in boxes if region.part.form != "zeros" else ():
        a, b, origin = low[rank, box], high[rank, box], held.low[rank, box]
        to = region.at - region.low
        positions.append(_positions(a + to, b + to, region.shape, dims - 1, 1, 1))
        shape = tuple(held.high[rank, box] - origin)
        own = _positions(a - origin, b - origin, shape, dims - 1, 1, 1)
        sources.append((rank * nbytes + offsets[rank]) // itemsize + before[rank, box] + own)
    return np.concatenate(positions), np.concatenate(sources)


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
