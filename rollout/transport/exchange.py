"""Executes a transfer plan: ranks exchange shards, and each rank assembles the parameters of its worker.

A round is one all-to-all of bytes, or one all-gather if every worker keeps the whole model. A rank copies its values to
a flat buffer and gathers its messages from rows of that. From the received messages it gathers the rows of its worker's
parameters, while the next round is in flight. ``plan/routes.py`` computes the rows once. A sync has a few operations
per round and one view per parameter, for any number of ranks, experts and blocks.
"""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ..layout.slice_names import slice_name
from ..layout.specs import TargetSlice, TensorSpec
from ..plan.routes import Arrival, Member, Route, route_of
from ..plan.transfer_plan import Round, TransferPlan
from .buckets import view
from .report import Traffic

__all__ = ["Exchange", "Received", "Values", "to_the_end"]

_T = TypeVar("_T")
_WORDS = torch.int64, torch.int32, torch.int16, torch.uint8
# Returns this rank's shard of a tensor, by its name.
Values = Callable[[str], torch.Tensor]


class Received(NamedTuple):
    """Indices ``first``, ``first + step``, ... along an axis of a worker's parameter; valid until the next request."""

    parameter: str
    axis: int
    first: int
    step: int
    values: torch.Tensor


class Exchange:
    """Executes one rank's part of a plan, which is equal on all ranks, once per sync.

    Args:
        rank: see ``Member.of``; ``group`` has its ranks in their order.
        dtypes: returns the dtype in which a tensor is sent, by its name.
        head_dim: rows of an attention head, for slices in ``halves``.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        slices_of: Callable[[TensorSpec, int], Sequence[TargetSlice]],
        dtypes: Callable[[str], torch.dtype],
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        head_dim: int = 1,
        finish: Callable[[dist.Work], object] = dist.Work.wait,
    ):
        self.plan, self.member, self.device, self.group = plan, Member.of(plan, rank), torch.device(device), group
        self._slices_of, self._dtypes, self._head_dim, self._finish = slices_of, dtypes, head_dim, finish
        self._rank = rank if plan.targets.are_separate else rank % plan.topology.fsdp  # in the group
        self._is_alone = len(self.member.targets) == 1
        self._position_bytes = 0
        rounds = (round_ for template in plan.templates for round_ in template.rounds)
        self._routes = {round_: self._on_device(route_of(round_, self.member, plan)) for round_ in rounds}
        self._parameter_names: dict[str, list[str]] = {}
        self.traffic = Traffic()

    def run(self, values: Values | None, traffic: Traffic | None = None) -> Generator[Received, None, None]:
        """Yield the parameters of this rank's worker, layer by layer in the model's order; collective.

        Closing the iterator receives and drops the rest. ``values`` may be collective, and is None on a rank that sends
        nothing.
        """
        self.traffic = traffic = traffic or Traffic()
        buffers = self._allocate()
        with traffic.holding(self._position_bytes + sum(buffer.nbytes for buffer in buffers)):
            yield from to_the_end(self._run(values, *buffers))

    def named(self, values: Values | None, traffic: Traffic) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Run and yield the parameters, or parts of them, by ``slice_name``."""
        with contextlib.closing(self.run(values, traffic)) as parameters:
            for parameter, axis, first, step, part in parameters:
                yield slice_name(parameter, first, step, axis), part

    def _run(
        self, values: Values | None, flat: torch.Tensor, sent: torch.Tensor, received: torch.Tensor, out: torch.Tensor
    ) -> Iterator[Received]:
        local: dict[str, torch.Tensor] = {}
        pending: dist.Work | None = None
        for (before, done), (prefix, round_) in itertools.pairwise([("", None), *self.plan.rounds, ("", None)]):
            if done is not None:
                if pending is not None:
                    self._finish(pending)
                route = self._routes[done]
                _gather_rows(received, route.received, done.unit, out)
                _gather_rows(received, route.received_words, done.word, out[len(route.received) * done.unit :])
            if round_ is not None:
                if values is not None:
                    names = [prefix + spec.name for spec in round_.specs.values()]
                    with torch.no_grad():  # all names on all ranks, because merging an adapter is collective
                        local = {name: local[name] if name in local else values(name) for name in names}
                        self._pack(prefix, round_, local, flat, sent)
                pending = self._start(self._routes[round_], sent, received)
            for arrival in route.arrivals if done is not None else ():
                yield self._received(before, arrival, out)

    def _allocate(self) -> list[torch.Tensor]:
        """Allocate buffers of the largest round: flat values, sent and received messages, worker's parameters."""
        sizes = [(r.flat_bytes, r.sent_bytes, r.received_bytes, r.nbytes) for r in self._routes.values()]
        most = [max(each) for each in zip(*sizes, strict=True)] or [0] * 4
        flat, sent, out = (torch.empty(most[i], dtype=torch.uint8, device=self.device) for i in (0, 1, 3))
        return [flat, sent, sent if self._is_alone else sent.new_empty(most[2]), out]

    def _pack(
        self, prefix: str, round_: Round, local: dict[str, torch.Tensor], flat: torch.Tensor, sent: torch.Tensor
    ) -> None:
        into, sources = [], []
        for copy in self._routes[round_].copies:
            name = prefix + round_.specs[copy.tensor].name
            source = local[name]
            if copy.inside is not None:
                source = source.reshape(source.shape or (1,))[copy.inside]
            into.append(view(flat, copy.start, source.shape, self._dtypes(name)))
            sources.append(source)
        if into:
            torch._foreach_copy_(into, sources)
        _gather_rows(flat, self._routes[round_].sent, round_.unit, sent)

    def _start(self, route: Route, sent: torch.Tensor, received: torch.Tensor) -> dist.Work | None:
        if self._is_alone:
            return None
        sent, received = sent[: route.sent_bytes], received[: route.received_bytes]
        others = len(received) - route.received_sizes[self._rank]
        self.traffic.received += others
        if self.plan.targets.are_gathered:
            self.traffic.sent += others
            return dist.all_gather_into_tensor(received, sent, group=self.group, async_op=True)
        self.traffic.sent += len(sent) - route.sent_sizes[self._rank]
        sizes = route.received_sizes, route.sent_sizes
        return dist.all_to_all_single(received, sent, *sizes, group=self.group, async_op=True)

    def _received(self, prefix: str, arrival: Arrival, out: torch.Tensor) -> Received:
        share, parameter, axis = arrival.share, arrival.parameter, arrival.axis
        name = self._names(prefix, arrival)[arrival.number]
        parts = []
        for region, start in arrival.placed:
            dtype = self._dtypes(prefix + share.bundle.specs[region.tensor].name)
            if not parameter.is_staged:
                return Received(name, axis, share.part, share.parts, view(out, start, arrival.shape, dtype))
            values = view(out, start, share.part_of(region.shape, share.bundle.part_dim), dtype)
            parts.append((region.part, _in_form(values, region.part, self._head_dim)))
        dtype = max((values.dtype for _, values in parts), key=lambda dtype: dtype.itemsize)
        whole = torch.empty(arrival.shape, dtype=dtype, device=self.device)
        for part, values in parts:
            into = [slice(low, high) for low, high in zip(part.at, part.end, strict=True)]
            if share.parts > 1:
                into[axis] = slice(None)
            target = whole[tuple(into)]
            target.copy_(values.reshape(target.shape))
        return Received(name, axis, share.part, share.parts, whole)

    def _names(self, prefix: str, arrival: Arrival) -> list[str]:
        specs = [arrival.share.bundle.specs[i] for i in arrival.share.bundle.tensors]
        key = prefix + specs[0].name
        if key not in self._parameter_names:
            full, kind = (replace(spec, name=prefix + spec.name) for spec in specs), self.member.kind
            assert kind is not None
            parts = (part for spec in full for part in self._slices_of(spec, kind))
            self._parameter_names[key] = list(dict.fromkeys(part.parameter for part in parts))
        return self._parameter_names[key]

    def _on_device(self, route: Route) -> Route:
        """Return a route whose positions are tensors on this rank's device."""

        def moved(positions: Any) -> Any:
            dtype = np.int32 if positions.max(initial=0) < 2**31 else np.int64
            self._position_bytes += positions.size * dtype().itemsize
            return torch.from_numpy(positions.astype(dtype)).to(self.device)

        sent, received, words = map(moved, (route.sent, route.received, route.received_words))
        return replace(route, sent=sent, received=received, received_words=words)


def to_the_end(found: Iterator[_T]) -> Generator[_T, None, None]:
    """Yield everything; exhaust the rest if the consumer stops early, because other ranks wait for this one."""
    try:
        for each in found:  # noqa: UP028  (`yield from` would close `found` with this generator)
            yield each
    finally:
        for _ in found:
            pass


def _gather_rows(source: torch.Tensor, rows: torch.Tensor, unit: int, into: torch.Tensor) -> None:
    """Copy rows of ``unit`` bytes of a buffer to another one."""
    if rows.numel():
        width = next(dtype for dtype in _WORDS if unit % dtype.itemsize == 0)
        table = source[: len(source) // unit * unit].view(width).view(-1, unit // width.itemsize)
        torch.index_select(table, 0, rows, out=into[: rows.numel() * unit].view(width).view(rows.numel(), -1))


def _in_form(values: torch.Tensor, part: TargetSlice, head_dim: int) -> torch.Tensor:
    """Convert a region's values to the parameter's form."""
    if part.form == "transposed":
        return values.transpose(-1, -2)
    if part.form == "zeros":
        return torch.zeros_like(values)
    if part.form == "decay":
        return -torch.exp(values.float())
    if part.form == "halves":
        return values.view(-1, head_dim // 2, 2, *values.shape[1:]).transpose(1, 2)
    return values
