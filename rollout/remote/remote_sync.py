"""Sends a trainer's weights to rollout ranks in other processes, possibly on other nodes.

The trainer publishes its tensors and their sharding (``TrainerLayout``); every rollout rank publishes what it needs
(``WorkerRequest``). From these every member computes the same plan, with the trainer's ranks as sources and the
rollout's as targets, and executes its part: each slice is sent from the rank that owns it to the ranks that keep it. If
any rollout rank supports full tensors only, all receive them, broadcast from trainer rank 0 in bounded buckets.

Where vLLM computes with adapters, the weights come without them, and only in a sync in which a rollout rank lacks them;
the adapters follow in every sync, broadcast to all.
"""

import contextlib
import json
import logging
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..layout.slice_names import named_values
from ..layout.specs import Rollout, SyncMode, TargetSlice, TensorSpec
from ..layout.transfer_plan import Targets, make_transfer_plan
from ..servers import BACKEND, choose_mode, planned_layouts, rollout_of, target_slices
from ..sync import RolloutSync, RolloutWeights
from ..transport.checksums import has_checksums
from ..transport.exchange import Exchange, ReceiveBuffers
from ..transport.report import SyncReport, Traffic, TransferStats
from ..transport.watched_sockets import WeightSyncError
from .buckets import Chunk, buckets_of, bytes_of
from .messages import TrainerLayout, WorkerRequest, trainer_layout
from .process_group import SyncGroup
from .relay import RelayedExchange, with_relays

__all__ = ["ReceivedWorkerWeights", "ReceivedWeights", "Receiver", "Sender"]

logger = logging.getLogger("epfsdp2")

# What numbered buckets are published as.
_BUCKETS, _ADAPTERS = "bucket", "adapters"


class _EmptyTensors(dict):
    """Stands for the trainer's tensors on a rank that owns none: every name maps to an empty tensor."""

    def __missing__(self, name: str) -> torch.Tensor:
        return torch.empty(0)


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
        requests = [replace(request, needs_base=True) for request in requests]  # which does not change the plan
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
                self.group.publish("layout", trainer_layout(weights, bucket_bytes))
            layout, requests = self.group.wait_for("layout"), self._wait_for_requests()
            if layout.peft_config:
                assert isinstance(weights, RolloutWeights), "adapters of other engines are merged"
                sent = self._adapters(weights.sync, layout, requests)
            else:
                sent = self._weights(weights, layout, requests)
        if self.group.rank > 0:
            return {}
        return {"weight_sync/sent_megabytes": sent / 2**20, "weight_sync/seconds": time.monotonic() - started}

    def _adapters(self, sync: RolloutSync, layout: TrainerLayout, requests: list[WorkerRequest]) -> int:
        """Send the weights without adapters to those of whom some have none yet, then the adapters."""
        sent, number = 0, sync.next_number()
        if any(request.needs_base for request in requests):
            sync.base.record()
            sent = self._weights(sync.weights("left out"), layout, requests)
        else:
            sync.base.check(has_checksums(number, layout.verify_syncs))
        return sent + self._broadcast(sync.adapters(), layout.limit, _ADAPTERS)

    def _weights(self, weights: Any, layout: TrainerLayout, requests: list[WorkerRequest]) -> int:
        if any(request.mode == "full" for request in requests):
            return self._broadcast(weights, layout.limit)
        assert isinstance(weights, RolloutWeights), "weights of other engines are sent as full tensors"
        sync, exchange = weights.sync, self._exchange(layout, requests)
        values = sync.values(weights.adapters, self.group.finish)
        for _ in exchange.run(sync.state(), sync.dtypes, values=values):
            raise AssertionError("a trainer rank receives no blocks")
        return max(exchange.plan.sent.get(rank, 0) for rank in range(self.group.members.trainers))

    def _broadcast(self, weights: Iterable[tuple[str, torch.Tensor]], limit: int, name: str = _BUCKETS) -> int:
        if self.group.rank > 0:
            for _ in weights:
                pass  # gathering a tensor is collective over the trainer's ranks
            return 0
        sent, index, pending = 0, 0, None
        for chunks, bucket in buckets_of(weights, limit, self.group.device):
            self.group.publish(f"{name} {index}", chunks)
            if pending is not None:
                self.group.finish(pending)
            pending = self.group.broadcast(bucket)
            sent, index = sent + bucket.numel(), index + 1
        self.group.publish(f"{name} {index}", None)
        if pending is not None:
            self.group.finish(pending)
        return sent


class Receiver(_Endpoint):
    """Receives the weights on a rollout rank.

    Attributes:
        syncs: number of syncs that have begun.
        has_base: whether the worker has the weights, where adapters come apart from them; None before the first sync.
    """

    syncs = 0
    has_base: bool | None = None

    def receive(self) -> "ReceivedWeights":
        """Begin a sync and return its weights.

        Raises:
            WeightSyncError: the trainer failed, or did not publish its layout in time.
        """
        with self.group.abort_on_error():
            self.group.begin_sync()
            self.syncs += 1
            return ReceivedWeights(self, self.group.wait_for("layout"))

    def exchange_requests(self, request: WorkerRequest) -> list[WorkerRequest]:
        """Publish what the worker requests, and return what all do."""
        with self.group.abort_on_error():
            self.group.publish(f"request {self.group.rank}", request)
            return self._wait_for_requests()

    def tensors(
        self,
        layout: TrainerLayout,
        request: WorkerRequest,
        traffic: Traffic,
        receive_buffers: ReceiveBuffers | None,
        requests: list[WorkerRequest] | None = None,
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield what the worker requested; collective over all members, even if the consumer stops early.

        Args:
            requests: what all members requested, where they are exchanged already.
        """
        requests = requests or self.exchange_requests(request)
        with self.group.abort_on_error():
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

    def adapters(self, traffic: Traffic) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the adapters of a sync; collective as ``tensors``."""
        with self.group.abort_on_error():
            yield from self._full(traffic, _ADAPTERS)

    def _full(self, traffic: Traffic, name: str = _BUCKETS) -> Generator[tuple[str, torch.Tensor], None, None]:
        index, pending = 0, self._bucket(name, 0)
        try:
            while pending is not None:
                chunks, bucket, work = pending
                index += 1
                pending = self._bucket(name, index)
                self.group.finish(work)
                traffic.received += bucket.numel()
                for chunk in chunks:
                    if chunk.start == 0:
                        tensor = torch.empty(chunk.shape, dtype=chunk.dtype, device=self.group.device)
                    stop = chunk.start + chunk.nbytes
                    bytes_of(tensor)[chunk.start : stop] = bucket[chunk.at : chunk.at + chunk.nbytes]
                    if stop == tensor.nbytes:
                        yield chunk.name, tensor
        finally:
            while pending is not None:
                self.group.finish(pending[2])
                index += 1
                pending = self._bucket(name, index)

    def _bucket(self, name: str, index: int) -> tuple[tuple["Chunk", ...], torch.Tensor, Any] | None:
        """Start to receive the next bucket; return None after the last."""
        chunks = self.group.wait_for(f"{name} {index}")
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
            mode, reason = choose_mode("auto", config, self._layout.family, backend=BACKEND)
            if reason and worker == 0:
                logger.warning("epfsdp2: engine.rollout_sync=%s falls back to full: %s", self._layout.requested, reason)
        return ReceivedWorkerWeights(self._receiver, self._layout, WorkerRequest(mode, rollout_of(config), worker))

    def stages(self, config: Any, worker: int) -> Iterator[tuple["ReceivedWorkerWeights | ReceivedAdapters", dict]]:
        """Yield what the worker loads one after the other, each with the arguments that vLLM's worker takes with it.

        It is the weights, where adapters are merged into them. Otherwise the weights without adapters, if any rollout
        rank has none yet, and the adapters; a stage is loaded when the next is asked for.
        """
        weights, receiver = self.for_rollout(config, worker), self._receiver
        if not self._layout.peft_config:
            yield weights, {}
            return
        if receiver.has_base is None:
            receiver.has_base = "dummy" not in str(config.get("load_format"))  # as in verl's colocated worker
        requests = weights.request(needs_base=not receiver.has_base)
        arguments = {"peft_config": json.loads(self._layout.peft_config)}
        if any(request.needs_base for request in requests):
            receiver.has_base = False
            yield weights, {**arguments, "base_sync_done": False}
            receiver.has_base = True
        yield ReceivedAdapters(receiver, weights.has_checksums), {**arguments, "base_sync_done": True}


class ReceivedAdapters:
    """The adapters of one sync for a worker that has the weights."""

    mode = "adapters"

    def __init__(self, receiver: Receiver, has_checksums: bool):
        self._receiver, self.has_checksums, self.traffic = receiver, has_checksums, Traffic()

    def tensors(self, receive_buffers: ReceiveBuffers | None = None) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield all adapters in full, under names that vLLM's adapter loader takes; collective."""
        return self._receiver.adapters(self.traffic)

    def report(self, transfer: TransferStats) -> SyncReport:
        """Make this sync's report."""
        return SyncReport(self._receiver.syncs, self.mode, self.traffic, transfer.nbytes, transfer)


class ReceivedWorkerWeights:
    """The weights of one sync for one worker (see ``sync.WorkerWeights``): full tensors if any worker requires them."""

    def __init__(self, receiver: Receiver, layout: TrainerLayout, request: WorkerRequest):
        self._receiver, self._layout, self._request = receiver, layout, request
        self._requests: list[WorkerRequest] | None = None
        self.mode = request.mode
        self.has_checksums = has_checksums(receiver.syncs, layout.verify_syncs)
        self.traffic = Traffic()

    def request(self, needs_base: bool) -> list[WorkerRequest]:
        """Publish the worker's request; return those of all members."""
        self._request = replace(self._request, needs_base=needs_base)
        self._requests = self._receiver.exchange_requests(self._request)
        return self._requests

    def tensors(self, receive_buffers: ReceiveBuffers | None = None) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield tensors or slices under names that the worker accepts; collective.

        Args:
            receive_buffers: memory to receive slices into, which saves a copy.
        """
        return self._receiver.tensors(self._layout, self._request, self.traffic, receive_buffers, self._requests)

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
