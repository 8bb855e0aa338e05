"""Executes a transfer plan: ranks exchange their shards, and each puts together the parameters of its worker.

A round is one all-to-all of bytes, or one all-gather where every worker keeps the whole model. A rank copies the values
that it sends to one flat buffer, gathers the rows of its messages from there, and gathers the rows of its worker's
parameters from what it receives. Which rows these are is computed once (``plan/routes.py``), so that a sync has a few
operations for each round and one view for each parameter, whatever the number of ranks, experts and blocks.

The next round is on its way while the consumer uses the parameters of the one before it.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..layout.specs import TargetSlice, TensorSpec
from ..plan.routes import Arrival, Member, pack_positions, unpack_positions
from ..plan.transfer_plan import TransferPlan
from .report import Traffic

__all__ = ["Exchange", "Received", "Values"]

# Returns the values that this rank holds of a tensor, by its name.
Values = Callable[[str], torch.Tensor]


class Received(NamedTuple):
    """Indices ``first``, ``first + step``, ... along an axis of a worker's parameter, in the parameter's layout.

    They are valid until the next ones are requested.
    """

    parameter: str
    axis: int
    first: int
    step: int
    values: torch.Tensor


@dataclass(frozen=True)
class _Route:
    """A round of a template on this rank, with positions on its device."""

    tensors: tuple[int, ...]
    copies: tuple[tuple[int, tuple[slice, ...] | None, int], ...]
    flat_bytes: int
    sent_rows: torch.Tensor
    sent_sizes: list[int]
    received_rows: torch.Tensor
    received_sizes: list[int]
    out_bytes: int
    short: int
    unit: int
    arrivals: tuple[Arrival, ...]
    elements: tuple[tuple[torch.Tensor, ...], ...]

    @property
    def index_bytes(self) -> int:
        tensors = (self.sent_rows, self.received_rows, *(t for found in self.elements for t in found))
        return sum(t.nbytes for t in tensors)


class Exchange:
    """Executes one rank's part of a plan, once per sync.

    Args:
        plan: made from the same facts on all ranks.
        member: this rank's part in it.
        slices_of: returns the slices of a tensor that this rank's worker keeps, as the plan was made with.
        dtypes: returns the dtype in which a tensor is sent, by its name.
        device: of all buffers and yielded values.
        group: ranks in the order of ``member``.
        head_dim: rows of an attention head, for parameters that hold the even rows of each before the odd ones.
        finish: waits for a collective.
    """

    def __init__(
        self,
        plan: TransferPlan,
        member: Member,
        slices_of: Callable[[TensorSpec], Sequence[TargetSlice]],
        dtypes: Callable[[str], torch.dtype],
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        head_dim: int = 1,
        finish: Callable[[dist.Work], object] = dist.Work.wait,
    ):
        self.plan, self.member, self.device, self.group = plan, member, torch.device(device), group
        self._slices_of, self._dtypes, self._head_dim, self._finish = slices_of, dtypes, head_dim, finish
        # `dist.get_rank` knows only groups of this process's world.
        self._rank, self._rounds = dist.get_rank() if group is None else group.rank(), list(plan.rounds)
        self._routes: dict[tuple[int, int], _Route] = {}
        self._parameter_names: dict[str, list[str]] = {}
        self.traffic = Traffic()

    def run(self, values: Values | None, traffic: Traffic | None = None) -> Generator[Received, None, None]:
        """Yield the parameters of this rank's worker, layer by layer in the model's order; collective.

        Every rank starts every round, even if its consumer stops early: closing the iterator receives and drops the
        rest. ``values`` is called for all tensors of a round in the same order on all ranks: it may be collective.

        Args:
            values: returns the values to send; None on a rank that sends nothing.
            traffic: counts the bytes that this run sends, receives and holds.
        """
        self.traffic = traffic = traffic or Traffic()
        buffers = self._allocate()
        held = sum(buffer.nbytes for buffer in buffers) + sum(route.index_bytes for route in self._routes.values())
        traffic.hold(held)
        found = self._run(values, *buffers)
        try:
            for each in found:  # noqa: UP028  (`yield from` would close `found` with this generator)
                yield each
        finally:
            for _ in found:  # other ranks go on with the remaining rounds
                pass
            traffic.release(held)

    def _run(
        self, values: Values | None, flat: torch.Tensor, sent: torch.Tensor, received: torch.Tensor, out: torch.Tensor
    ) -> Iterator[Received]:
        local: dict[str, torch.Tensor] = {}
        pending = None
        for prefix, template, number in [*self._rounds, ("", -1, -1)]:
            done = None
            if pending is not None:
                work, done = pending
                if work is not None:
                    self._finish(work)
                self._gather(received, done[1].received_rows, done[1].unit, out)
            if template >= 0:
                route = self._route(template, number)
                if values is not None:
                    local = self._pack(prefix, template, route, values, local, flat, sent)
                pending = (self._start(route, sent, received), (prefix, route))
            if done is not None:
                yield from self._arrivals(*done, out)

    def _allocate(self) -> list[torch.Tensor]:
        """Allocate the flat buffer, what is sent, what is received, and the worker's parameters of a round."""
        routes = [self._route(template, number) for _, template, number in dict.fromkeys(self._rounds)]
        is_alone = self._is_alone
        sizes = (
            max((r.flat_bytes for r in routes), default=0),
            max((sum(r.sent_sizes) for r in routes), default=0),
            max((sum(r.received_sizes) for r in routes), default=0) if not is_alone else 0,
            max((r.out_bytes for r in routes), default=0),
        )
        flat, sent, received, out = (torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes)
        return [flat, sent, sent if is_alone else received, out]

    @cached_property
    def _is_alone(self) -> bool:
        return dist.get_world_size(self.group) == 1

    def _pack(
        self,
        prefix: str,
        template: int,
        route: _Route,
        values: Values,
        before: dict[str, torch.Tensor],
        flat: torch.Tensor,
        sent: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Fill the messages of a round; return its values, which the next round may need again."""
        specs = self.plan.templates[template].tensors
        names = {i: prefix + specs[i].name for i in route.tensors}
        with torch.no_grad():
            local: dict[str, torch.Tensor] = {}
            for name in names.values():  # all of them: merging an adapter is collective
                local[name] = before[name] if name in before else values(name)
            into, sources = [], []
            for i, inside, start in route.copies:
                source, dtype = local[names[i]], self._dtypes(names[i])
                if inside is not None:
                    source = source.reshape(source.shape or (1,))[inside]
                into.append(flat[start : start + source.numel() * dtype.itemsize].view(dtype).view(source.shape))
                sources.append(source)
            if into:
                torch._foreach_copy_(into, sources)
            self._gather(flat, route.sent_rows, route.unit, sent)
        return local

    def _gather(self, source: torch.Tensor, rows: torch.Tensor, unit: int, into: torch.Tensor) -> None:
        """Copy rows of ``unit`` bytes of a buffer to another one."""
        if rows.numel():
            width = next(dtype for dtype in _WORDS if unit % dtype.itemsize == 0)
            most = source.numel() // unit * unit
            target = into[: rows.numel() * unit].view(width).view(rows.numel(), -1)
            torch.index_select(source[:most].view(width).view(-1, unit // width.itemsize), 0, rows, out=target)

    def _start(self, route: _Route, sent: torch.Tensor, received: torch.Tensor) -> dist.Work | None:
        own_sent, own_received = sum(route.sent_sizes), sum(route.received_sizes)
        if self._is_alone:
            return None
        sent, received = sent[:own_sent], received[:own_received]
        self.traffic.received += own_received - route.received_sizes[self._rank]
        if self.plan.is_gather:
            self.traffic.sent += own_received - route.received_sizes[self._rank]
            return dist.all_gather_into_tensor(received, sent, group=self.group, async_op=True)
        self.traffic.sent += own_sent - route.sent_sizes[self._rank]
        return dist.all_to_all_single(
            received, sent, route.received_sizes, route.sent_sizes, group=self.group, async_op=True
        )

    def _arrivals(self, prefix: str, route: _Route, out: torch.Tensor) -> Iterator[Received]:
        for arrival, elements in zip(route.arrivals, route.elements, strict=True):
            name = self._names(prefix, arrival)[arrival.number]
            values = self._assembled(prefix, arrival, elements, route, out)
            yield Received(name, arrival.axis, arrival.part, arrival.parts, values)

    def _assembled(
        self, prefix: str, arrival: Arrival, elements: Sequence[torch.Tensor], route: _Route, out: torch.Tensor
    ) -> torch.Tensor:
        """Return the values of an arrival in the parameter's layout."""
        specs, parameter = arrival.bundle.specs, self._parameter(arrival)

        def dtype_of(tensor: int) -> torch.dtype:
            return self._dtypes(prefix + specs[tensor].name)

        def received(start: int, shape: Sequence[int], dtype: torch.dtype, which: int) -> torch.Tensor:
            if elements:
                area = out[route.short : route.out_bytes].view(dtype)
                return area.index_select(0, elements[which]).view(shape)
            return out[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

        if not parameter.is_staged:
            return received(arrival.start, arrival.shape, dtype_of(parameter.regions[0].tensor), 0)
        parts = [
            (placed.region.part, received(placed.start, placed.shape, dtype_of(placed.region.tensor), which))
            for which, placed in enumerate(arrival.placements)
        ]
        dtypes = [torch.float32 if part.form == "decay" else values.dtype for part, values in parts]
        whole = torch.empty(arrival.shape, dtype=max(dtypes, key=lambda dtype: dtype.itemsize), device=self.device)
        for part, values in parts:
            into = [slice(low, high) for low, high in zip(part.at, part.end, strict=True)]
            if arrival.parts > 1:
                into[arrival.axis] = slice(None)
            target = whole[tuple(into)]
            target.copy_(_in_form(values, part, self._head_dim).reshape(target.shape))
        return whole

    def _parameter(self, arrival: Arrival):
        assert self.member.kind is not None
        return arrival.bundle.by_kind[self.member.kind][arrival.number]

    def _names(self, prefix: str, arrival: Arrival) -> list[str]:
        """Return the names of a bundle's parameters in this layer."""
        specs = arrival.bundle.specs
        key = prefix + specs[arrival.bundle.tensors[0]].name
        if key not in self._parameter_names:
            full = (TensorSpec(prefix + specs[i].name, *_facts(specs[i])) for i in arrival.bundle.tensors)
            slices = (part.parameter for tensor in full for part in self._slices_of(tensor))
            self._parameter_names[key] = list(dict.fromkeys(slices))
        return self._parameter_names[key]

    def _route(self, template: int, number: int) -> _Route:
        if (template, number) not in self._routes:
            self._routes[template, number] = self._plan_route(template, number)
        return self._routes[template, number]

    def _plan_route(self, template: int, number: int) -> _Route:
        round_, member = self.plan.templates[template].rounds[number], self.member
        bundles = [*(share.bundle for share in round_.long), *round_.short]
        tensors = tuple(dict.fromkeys(i for bundle in bundles for i in bundle.tensors))
        none: list[int] = [0] * len(member.targets)
        sent_rows, sent_sizes, flat_bytes, copies = np.zeros(0, dtype=np.int64), none, 0, ()
        rows, sizes, out_bytes, short, arrivals = np.zeros(0, dtype=np.int64), none, 0, 0, ()
        if member.kind is not None:
            found = unpack_positions(round_, member, self.plan.topology.fsdp)
            rows, sizes, out_bytes, short, arrivals = (
                found.rows,
                list(found.sizes),
                found.nbytes,
                found.short,
                found.arrivals,
            )
        if member.source is not None:
            packing = pack_positions(round_, member)
            sent_rows, sent_sizes, copies = packing.rows, list(packing.sizes), packing.values
            flat_bytes = max(packing.nbytes, round_.unit)
        if self.plan.is_gather:  # one message for all, as long as the longest of any rank
            rows, sizes = _with_stride(rows, sizes, round_.unit)
            own = sent_sizes[0] // round_.unit
            sent_rows = np.concatenate([sent_rows[:own], np.zeros(sizes[0] // round_.unit - own, dtype=np.int64)])
            sent_sizes = sizes[:1]
        return _Route(
            tensors,
            copies,
            flat_bytes,
            self._on_device(sent_rows),
            sent_sizes,
            self._on_device(rows),
            sizes,
            out_bytes,
            short,
            round_.unit,
            arrivals,
            tuple(tuple(map(self._on_device, arrival.elements)) for arrival in arrivals),
        )

    def _on_device(self, positions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(
            positions.astype(np.int32 if positions.size and positions.max() < 2**31 else np.int64)
        ).to(self.device)


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _facts(spec: TensorSpec) -> tuple:
    return spec.shape, spec.itemsize, spec.cuts


def _with_stride(rows: np.ndarray, sizes: Sequence[int], unit: int) -> tuple[np.ndarray, list[int]]:
    """Return positions in messages that are all as long as the longest, and these lengths."""
    lengths, most = np.array(sizes) // unit, max(sizes) // unit
    begins = np.cumsum(lengths) - lengths
    source = np.searchsorted(begins + lengths, rows, side="right")
    return rows - begins[source] + source * most, [most * unit] * len(sizes)


def _in_form(values: torch.Tensor, part: TargetSlice, head_dim: int) -> torch.Tensor:
    """Return a region's values as the parameter stores them."""
    if part.form == "transposed":
        return values.transpose(-1, -2)
    if part.form == "zeros":
        return torch.zeros_like(values)
    if part.form == "decay":
        return -torch.exp(values.float())
    if part.form == "halves":
        return values.view(-1, head_dim // 2, 2, *values.shape[1:]).transpose(1, 2)
    return values
