"""Sends a trainer's weights to rollout ranks in other processes, possibly on other nodes.

The trainer publishes its tensors and their sharding (``TrainerLayout``); every rollout rank publishes what it needs
(``WorkerRequest``). From these every member computes the same plan, with the trainer's ranks as sources and the
rollout's as targets, and executes its part: each slice is sent from the rank that owns it to the ranks that keep it. If
any rollout rank supports full tensors only, all receive them, broadcast from trainer rank 0 in bounded buckets.
"""

import contextlib
import logging
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.compat import versions
from ...engine.topology.index_ranges import ShardStep
from ...engine.topology.mesh import Topology
from ..layout.layout_check import planned_layouts
from ..layout.slice_names import named_values
from ..layout.sync_mode import BACKEND, choose_mode, rollout_of
from ..layout.transfer_plan import Targets, make_transfer_plan, round_bytes
from ..layout.vllm_layout import Heads, Rollout, SyncMode, TargetSlice, TensorSpec, target_slices
from ..sync import RolloutSync, RolloutWeights
from ..transport.checksums import has_checksums
from ..transport.exchange import Exchange, ReceiveBuffers
from ..transport.report import SyncReport, Traffic, TransferStats
from ..transport.watched_sockets import WeightSyncError
from .process_group import SyncGroup, register_message_types
from .relay import RelayedExchange, with_relays

__all__ = ["ReceivedWorkerWeights", "ReceivedWeights", "Receiver", "Sender"]

logger = logging.getLogger("epfsdp2")


class _EmptyTensors(dict):
    """Stands for the trainer's tensors on a rank that owns none: every name maps to an empty tensor."""

    def __missing__(self, name: str) -> torch.Tensor:
        return torch.empty(0)


@dataclass(frozen=True)
class ShardedModel:
    """The trainer's tensors, sharding and dtypes, from which a plan is made."""

    tensors: tuple[TensorSpec, ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    layers: tuple[str, ...]
    topology: Topology
    heads: Heads


@dataclass(frozen=True)
class TrainerLayout:
    """The trainer's settings and model, as trainer rank 0 publishes them.

    Args:
        requested: the user's ``engine.rollout_sync``.
        verify_syncs: number of first syncs that carry checksums; -1 for all.
        family: ``model_type`` of the model.
        limit: bytes of a round, or of a bucket of full tensors.
        model: None for weights of another engine, which are sent as full tensors.
    """

    requested: str
    verify_syncs: int
    family: str
    limit: int
    model: ShardedModel | None = None


@dataclass(frozen=True)
class WorkerRequest:
    """What a rollout rank requests: a sync mode, and its index in its replica."""

    mode: SyncMode
    rollout: Rollout
    worker: int


def _trainer_layout(weights: Any, bucket_bytes: int) -> TrainerLayout:
    if not isinstance(weights, RolloutWeights):
        return TrainerLayout("full", 0, "", bucket_bytes)
    sync = weights.sync
    model = ShardedModel(
        tuple(sync.tensor_specs()), tuple(sync.dtypes.items()), tuple(sync.layers), sync.meshes.topology, sync.heads
    )
    settings = sync.settings
    return TrainerLayout(
        settings.requested, settings.verify_syncs, sync.family, round_bytes(settings.memory_bytes), model
    )


class _Endpoint:
    """Planning, which trainer and rollout ranks share."""

    def __init__(self, group: SyncGroup):
        self.group = group
        self._cached_plan: tuple[TrainerLayout, list[WorkerRequest], Exchange, str] | None = None

    def _exchange(self, layout: TrainerLayout, requests: list[WorkerRequest]) -> Exchange:
        """Return the exchange for this member; it is planned again only if the layout or a request has changed.

        Raises:
            WeightSyncError: this rank's plan differs from that of trainer rank 0.
        """
        if self._cached_plan is None or self._cached_plan[:2] != (layout, requests):
            exchange = self._plan(layout, requests)
            self._cached_plan = (layout, requests, exchange, exchange.plan.digest())
        exchange, digest = self._cached_plan[2:]
        if self.group.rank == 0:
            self.group.publish("plan", digest)
        elif (other := self.group.wait_for("plan")) != digest:
            raise WeightSyncError(f"this rank's plan is {digest}, that of trainer rank 0 is {other}")
        return exchange

    def _plan(self, layout: TrainerLayout, requests: list[WorkerRequest]) -> Exchange:
        members, sharded = self.group.members, layout.model
        assert sharded is not None, "weights of other engines are sent as full tensors"

        def slices_of(tensor: TensorSpec, rank: int) -> list[TargetSlice]:
            if rank < members.trainers:
                return []
            request = requests[rank - members.trainers]
            return target_slices(tensor, request.rollout, request.worker, sharded.heads, request.mode)

        # Targets are numbered by group rank, like sources; trainer ranks are targets that need nothing.
        targets = Targets(len(members.nodes), colocated=False)
        plan = make_transfer_plan(sharded.tensors, sharded.layers, sharded.topology, targets, slices_of, layout.limit)
        rank = self.group.rank
        return RelayedExchange(
            with_relays(plan, members.nodes),
            lambda tensor: slices_of(tensor, rank),
            rank,
            self.group.device,
            self.group.process_group,
            sources=members.trainers,
            finish=self.group.finish,
        )

    def _wait_for_requests(self) -> list[WorkerRequest]:
        return [self.group.wait_for(f"request {rank}") for rank in self.group.members.rollouts]


class Sender(_Endpoint):
    """Sends the weights of a trainer rank."""

    def send(self, weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> dict[str, float]:
        """Send the weights of one sync; collective over all members.

        Args:
            weights: ``RolloutWeights``, or full tensors of another engine, which every trainer rank iterates.
            bucket_bytes: bound of a bucket for the latter.

        Returns:
            Metrics of this sync by name: the most megabytes that any trainer rank sent, and seconds. Empty but on rank
            0, since verl keeps those of one rank.

        Raises:
            WeightSyncError: a member failed.
        """
        started = time.monotonic()
        with self.group.abort_on_error():
            self.group.begin_sync()
            if self.group.rank == 0:
                self.group.publish("layout", _trainer_layout(weights, bucket_bytes))
            layout, requests = self.group.wait_for("layout"), self._wait_for_requests()
            if any(request.mode == "full" for request in requests):
                sent = self._broadcast(weights, layout.limit)
            else:
                assert isinstance(weights, RolloutWeights), "weights of other engines are sent as full tensors"
                sent = self._slices(weights.sync, self._exchange(layout, requests))
        if self.group.rank > 0:
            return {}
        return {"weight_sync/sent_megabytes": sent / 2**20, "weight_sync/seconds": time.monotonic() - started}

    def _slices(self, sync: RolloutSync, exchange: Exchange) -> int:
        for _ in exchange.run(sync.state(), sync.dtypes, values=sync.values()):
            raise AssertionError("a trainer rank receives no blocks")
        return max(exchange.plan.sent.get(rank, 0) for rank in range(self.group.members.trainers))

    def _broadcast(self, weights: Iterable[tuple[str, torch.Tensor]], limit: int) -> int:
        if self.group.rank > 0:
            for _ in weights:
                pass  # gathering a tensor is collective over the trainer's ranks
            return 0
        sent, index, pending = 0, 0, None
        for chunks, bucket in _buckets(weights, limit, self.group.device):
            self.group.publish(f"bucket {index}", chunks)
            if pending is not None:
                self.group.finish(pending)
            pending = self.group.broadcast(bucket)
            sent, index = sent + bucket.numel(), index + 1
        self.group.publish(f"bucket {index}", None)
        if pending is not None:
            self.group.finish(pending)
        return sent


class Receiver(_Endpoint):
    """Receives the weights on a rollout rank.

    Attributes:
        syncs: number of syncs that have begun.
    """

    syncs = 0

    def receive(self) -> "ReceivedWeights":
        """Begin a sync and return its weights.

        Raises:
            WeightSyncError: the trainer failed, or did not publish its layout in time.
        """
        with self.group.abort_on_error():
            self.group.begin_sync()
            self.syncs += 1
            return ReceivedWeights(self, self.group.wait_for("layout"))

    def tensors(
        self,
        layout: TrainerLayout,
        request: WorkerRequest,
        traffic: Traffic,
        receive_buffers: ReceiveBuffers | None,
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield what the worker requested; collective over all members, even if the consumer stops early."""
        with self.group.abort_on_error():
            self.group.publish(f"request {self.group.rank}", request)
            requests = self._wait_for_requests()
            if any(other.mode == "full" for other in requests):
                yield from self._full(traffic)
                return
            exchange, sharded = self._exchange(layout, requests), layout.model
            assert sharded is not None
            blocks = exchange.run(_EmptyTensors(), dict(sharded.dtypes), traffic, receive_buffers=receive_buffers)
            with contextlib.closing(blocks):
                for found in blocks:
                    slices = target_slices(found.tensor, request.rollout, request.worker, sharded.heads, request.mode)
                    yield from named_values(found.block, found.values, slices)

    def _full(self, traffic: Traffic) -> Generator[tuple[str, torch.Tensor], None, None]:
        index, pending = 0, self._bucket(0)
        try:
            while pending is not None:
                chunks, bucket, work = pending
                index += 1
                pending = self._bucket(index)
                self.group.finish(work)
                traffic.received += bucket.numel()
                for chunk in chunks:
                    if chunk.start == 0:
                        tensor = torch.empty(chunk.shape, dtype=chunk.dtype, device=self.group.device)
                    stop = chunk.start + chunk.nbytes
                    _bytes(tensor)[chunk.start : stop] = bucket[chunk.at : chunk.at + chunk.nbytes]
                    if stop == tensor.nbytes:
                        yield chunk.name, tensor
        finally:
            while pending is not None:
                self.group.finish(pending[2])
                index += 1
                pending = self._bucket(index)

    def _bucket(self, index: int) -> tuple[tuple["_Chunk", ...], torch.Tensor, Any] | None:
        """Start to receive the next bucket; return None after the last."""
        chunks = self.group.wait_for(f"bucket {index}")
        if chunks is None:
            return None
        bucket = torch.empty(sum(c.nbytes for c in chunks), dtype=torch.uint8, device=self.group.device)
        return chunks, bucket, self.group.broadcast(bucket)


class ReceivedWeights:
    """The weights of one sync on a rollout rank: iterate it for full tensors, or call ``for_rollout``, not both."""

    def __init__(self, receiver: Receiver, layout: TrainerLayout):
        self._receiver, self._layout = receiver, layout

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ReceivedWorkerWeights(self._receiver, self._layout, WorkerRequest("full", Rollout(), 0)).tensors()

    def for_rollout(self, config: Any, worker: int) -> "ReceivedWorkerWeights":
        """Return the weights for the worker with this index in its replica.

        Slices are the fewest bytes for any rollout that is not colocated, so every setting but ``full`` means slices.

        Args:
            config: verl's rollout config.
        """
        mode: SyncMode = "full"
        if self._layout.requested != "full":
            untested = versions.unknown_layout(config.get("name") or "vllm")
            mode, reason = choose_mode("auto", config, self._layout.family, untested=untested, backend=BACKEND)
            if reason and worker == 0:
                logger.warning("epfsdp2: engine.rollout_sync=%s falls back to full: %s", self._layout.requested, reason)
        return ReceivedWorkerWeights(self._receiver, self._layout, WorkerRequest(mode, rollout_of(config), worker))


class ReceivedWorkerWeights:
    """The weights of one sync for one worker (see ``sync.WorkerWeights``): full tensors if any worker requires them."""

    def __init__(self, receiver: Receiver, layout: TrainerLayout, request: WorkerRequest):
        self._receiver, self._layout, self._request = receiver, layout, request
        self.mode = request.mode
        self.has_checksums = has_checksums(receiver.syncs, layout.verify_syncs)
        self.traffic = Traffic()

    def tensors(self, receive_buffers: ReceiveBuffers | None = None) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield tensors or slices under names that the worker accepts; collective.

        Args:
            receive_buffers: memory to receive slices into, which saves a copy.
        """
        return self._receiver.tensors(self._layout, self._request, self.traffic, receive_buffers)

    def planned_layouts(self) -> list[dict[str, str]]:
        """Return the layout that is planned for each worker of the replica (``layout/layout_check.py``)."""
        sharded = self._layout.model
        assert sharded is not None, "weights of other engines are sent as full tensors"
        return planned_layouts(sharded.tensors, self._request.rollout, sharded.heads)

    def check_plans(self, failure: Exception | None) -> None:
        """Raise this rank's failure, if any, on all members; plans are compared when they are made.

        Raises:
            WeightSyncError: on all members.
        """
        with self._receiver.group.abort_on_error():
            if failure is not None:
                raise failure

    def report(self, transfer: TransferStats) -> SyncReport:
        """Make this sync's report."""
        return SyncReport(self._receiver.syncs, self.mode, self.traffic, transfer.nbytes, transfer)


@dataclass(frozen=True)
class _Chunk:
    """Bytes of a tensor from ``start`` on, at byte ``at`` of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    at: int
    nbytes: int


register_message_types(
    TrainerLayout, ShardedModel, WorkerRequest, _Chunk, TensorSpec, ShardStep, Topology, Heads, Rollout
)


def _buckets(
    weights: Iterable[tuple[str, torch.Tensor]], limit: int, device: torch.device
) -> Iterator[tuple[list[_Chunk], torch.Tensor]]:
    """Pack tensors in order into buckets of ``limit`` bytes; a tensor may continue in the next bucket."""
    bucket, used = torch.empty(limit, dtype=torch.uint8, device=device), 0
    chunks: list[_Chunk] = []
    for name, tensor in weights:
        values, start = _bytes(tensor.detach().contiguous()), 0
        while start < values.numel() or not chunks or chunks[-1].name != name:  # empty tensors get a chunk too
            if used == limit and start < values.numel():
                yield chunks, bucket
                bucket, chunks, used = torch.empty_like(bucket), [], 0
            nbytes = min(values.numel() - start, limit - used)
            bucket[used : used + nbytes] = values[start : start + nbytes]
            chunks.append(_Chunk(name, tensor.dtype, tuple(tensor.shape), start, used, nbytes))
            start, used = start + nbytes, used + nbytes
    if chunks:
        yield chunks, bucket[:used]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
