"""Sends a trainer's weights to rollout ranks in other processes, possibly on other nodes.

The trainer publishes its tensors and their sharding (``TrainerLayout``); every rollout rank publishes what it needs
(``WorkerRequest``). From these every member computes the same plan, with the trainer's ranks as sources and the
rollout's as targets, and executes its part of the same exchange as colocated ranks (``transport/exchange.py``). If any
rollout rank supports full tensors only, all receive them, broadcast from trainer rank 0 in bounded buckets.

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

from ..layout.slice_names import slice_name
from ..layout.specs import Rollout
from ..plan.routes import Member
from ..plan.transfer_plan import Targets, make_transfer_plan
from ..sent_tensors import dtype_in, slices_of_workers, with_scales
from ..servers import BACKEND, choose_mode, planned_layouts, rollout_of
from ..sync import RolloutSync, RolloutWeights
from ..transport.checksums import has_checksums
from ..transport.exchange import Exchange
from ..transport.report import SyncReport, Traffic, TransferStats
from ..transport.watched_sockets import WeightSyncError
from .buckets import Chunk, buckets_of, bytes_of
from .messages import TrainerLayout, WorkerRequest, trainer_layout
from .process_group import SyncGroup

__all__ = ["ReceivedWeights", "Receiver", "Sender"]

logger = logging.getLogger("epfsdp2")

# What numbered buckets are published as.
_BUCKETS, _ADAPTERS = "bucket", "adapters"


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
        sharded, rollout = layout.model, requests[0].rollout
        assert sharded is not None, "weights of other engines are sent as full tensors"
        if any(request.rollout != rollout for request in requests):
            raise WeightSyncError("the rollout's ranks are sharded in different ways")
        tensors = with_scales(sharded.tensors, rollout, layout.family)
        slices_of = slices_of_workers(tensors, rollout, sharded.heads)
        targets = Targets.separate([request.worker for request in requests], sharded.topology)
        plan = make_transfer_plan(tensors, sharded.layers, sharded.topology, targets, slices_of, layout.limit)
        member = Member.separate(plan, self.group.rank)
        return Exchange(
            plan,
            member,
            lambda tensor: [] if member.kind is None else slices_of(tensor, member.kind),
            dtype_in(dict(sharded.dtypes), rollout, layout.family),
            self.group.device,
            self.group.process_group,
            sharded.heads.dim,
            self.group.finish,
        )

    def _wait_for_requests(self, own: WorkerRequest | None = None) -> list[WorkerRequest]:
        return self.group.gather("request", own, self.group.members.rollouts)


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
        return sent + self._broadcast(sync.weights("alone"), layout.limit, _ADAPTERS)

    def _weights(self, weights: Any, layout: TrainerLayout, requests: list[WorkerRequest]) -> int:
        if any(request.mode == "full" for request in requests):
            return self._broadcast(weights, layout.limit)
        assert isinstance(weights, RolloutWeights), "weights of other engines are sent as full tensors"
        exchange = self._exchange(layout, requests)
        for _ in exchange.run(weights.sync.values(weights.adapters, requests[0].rollout, self.group.finish)):
            raise AssertionError("a trainer rank receives no parameters")
        return exchange.plan.most_sent

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
            return self._wait_for_requests(request)

    def tensors(
        self,
        layout: TrainerLayout,
        request: WorkerRequest,
        traffic: Traffic,
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
            with contextlib.closing(self._exchange(layout, requests).run(None, traffic)) as parameters:
                for parameter, first, step, values in parameters:
                    yield slice_name(parameter, first, step), values

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
    """The weights of one sync on a rollout rank (``sync.RolloutWeights``): iterate it for full tensors.

    Attributes:
        mode: full tensors, the worker's parameters (``sliced``), or the adapters alone. All ranks get full tensors if
            any requires them.
    """

    def __init__(self, receiver: Receiver, layout: TrainerLayout):
        self._receiver, self._layout = receiver, layout
        self._request = WorkerRequest("full", Rollout(), 0)
        self._requests: list[WorkerRequest] | None = None
        self.mode: str = "full"
        self.has_checksums = has_checksums(receiver.syncs, layout.verify_syncs)
        self.is_quantised_here = False
        self.traffic = Traffic()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors()

    def for_rollout(self, config: Any, worker: int) -> "ReceivedWeights":
        """Choose what the worker with this index in its replica gets.

        A worker's own parameters are the fewest bytes for any rollout that is not colocated, so every setting but
        ``full`` means these.

        Args:
            config: verl's rollout config.
        """
        if self._layout.requested != "full":
            self.mode, reason = choose_mode("auto", config, self._layout.family, backend=BACKEND)
            if reason and worker == 0:
                logger.warning("epfsdp2: engine.rollout_sync=%s falls back to full: %s", self._layout.requested, reason)
        self._request = WorkerRequest(self.mode, rollout_of(config), worker)
        self.is_quantised_here = self.mode == "sliced" and self._request.rollout.is_quantised
        return self

    def stages(self, config: Any, worker: int) -> Iterator[tuple["ReceivedWeights", dict[str, Any]]]:
        """Yield what the worker loads one after the other, each with the arguments that vLLM's worker takes with it.

        It is the weights, where adapters are merged into them. Otherwise the weights without adapters, if any rollout
        rank has none yet, and the adapters; a stage is loaded when the next is asked for.
        """
        receiver, arguments = self._receiver, {}
        weights = self.for_rollout(config, worker)
        if not self._layout.peft_config:
            yield weights, {}
            return
        if receiver.has_base is None:
            receiver.has_base = "dummy" not in str(config.get("load_format"))  # as in verl's colocated worker
        self._request = replace(self._request, needs_base=not receiver.has_base)
        self._requests = receiver.exchange_requests(self._request)
        arguments = {"peft_config": json.loads(self._layout.peft_config)}
        if any(request.needs_base for request in self._requests):
            receiver.has_base = False
            yield weights, {**arguments, "base_sync_done": False}
            receiver.has_base = True
        adapters = ReceivedWeights(receiver, self._layout)
        adapters.mode = "adapters"
        yield adapters, {**arguments, "base_sync_done": True}

    def tensors(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield tensors or parameters under names that the worker accepts; collective."""
        if self.mode == "adapters":
            return self._receiver.adapters(self.traffic)
        return self._receiver.tensors(self._layout, self._request, self.traffic, self._requests)

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
