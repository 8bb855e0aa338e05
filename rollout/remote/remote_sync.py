"""Sends a trainer's weights to rollout ranks in other processes, possibly on other nodes.

Trainer rank 0 publishes a ``TrainerLayout``, and every rollout rank a ``WorkerRequest``. From these every member makes
the same plan for the exchange (``transport/exchange.py``). Trainer rank 0 broadcasts full tensors in buckets, and
adapters that vLLM computes with. The weights below adapters are sent before them if a rollout rank lacks them.
"""

import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..layout.specs import Rollout, SyncMode
from ..plan.transfer_plan import Targets, round_bytes
from ..servers import BACKEND, choose_mode, server_of, untested
from ..transport.buckets import Entry, buckets_of, tensors_of
from ..transport.checksums import has_checksums
from ..transport.exchange import Exchange, to_the_end
from ..transport.report import SyncReport, Traffic, TransferStats
from ..transport.watched_sockets import WeightSyncError
from .messages import TrainerLayout, WorkerRequest, trainer_layout
from .process_group import SyncGroup

__all__ = ["Endpoint", "ReceivedWeights", "send_buckets"]

logger = logging.getLogger("epfsdp2")


class Endpoint:
    """Sends or receives a rank's weights, sync after sync; all members raise ``WeightSyncError`` if one fails."""

    has_base: bool | None = None  # whether the worker has the weights below its adapters; None before the first sync
    is_compared, other_layout = False, ""  # as in ``sync.RolloutSync``
    _planned: tuple[object, Exchange, str] | None = None

    def __init__(self, group: SyncGroup):
        self.group = group

    def send(self, weights: Any, bucket_bytes: int) -> dict[str, float]:
        """Send the weights of one sync; collective over all members.

        ``weights`` are ``RolloutWeights``, or full tensors of another engine, sent in buckets of ``bucket_bytes``.
        Rank 0 returns metrics: the most megabytes of any trainer rank, and seconds.
        """
        started, sent = time.monotonic(), 0
        with self.group.abort_on_error():
            self.group.begin_sync()
            if self.group.rank == 0:
                self.group.publish("layout", trainer_layout(weights, bucket_bytes))
            layout, requests = self.group.wait_for("layout"), self.requests()
            if not layout.peft_config:
                sent = self._send(self.compared(requests), weights, layout, requests)
            else:
                sync, number = weights.sync, next(weights.sync.numbers)
                if any(request.needs_base for request in requests):
                    sync.base.record()
                    sent = self._send(self.compared(requests), sync.weights("left out"), layout, requests)
                else:
                    sync.base.check(has_checksums(number, layout.settings.verify_syncs))
                sent += self._send("adapters", sync.weights("alone"), layout, requests)
        if self.group.rank > 0:
            return {}
        return {"weight_sync/sent_megabytes": sent / 2**20, "weight_sync/seconds": time.monotonic() - started}

    def _send(self, mode: str, weights: Any, layout: TrainerLayout, requests: Sequence[WorkerRequest]) -> int:
        if mode == "sliced":
            exchange, rollout = self.exchange(layout, requests), requests[0].rollout
            # A trainer rank receives no parameters.
            assert not list(exchange.run(weights.sync.values(weights.adapters, rollout, self.group.finish)))
            return exchange.plan.most_sent
        if self.group.rank == 0:
            return send_buckets(self.group, mode, weights, round_bytes(layout.settings.memory_bytes))
        for _ in weights:
            pass  # gathering a tensor is collective over the trainer's ranks
        return 0

    def receive(self) -> "ReceivedWeights":
        with self.group.abort_on_error():
            self.group.begin_sync()
            return ReceivedWeights(self, self.group.wait_for("layout"))

    def requests(self, own: WorkerRequest | None = None) -> list[WorkerRequest]:
        """Return the requests of all rollout ranks; collective. Raises if configs or releases differ."""
        found = self.group.gather("request", own, self.group.members.rollouts)
        kinds = list(dict.fromkeys(f"{r.mode}{' on trial' * r.is_on_trial} for {r.rollout}" for r in found))
        if len(kinds) > 1:
            raise WeightSyncError(f"the rollout's ranks differ in config or release: {kinds[0]}, and {kinds[1]}")
        return found

    def compared(self, requests: Sequence[WorkerRequest], failure: str = "") -> str:
        """Return the mode of this sync: full if a worker on trial has another layout than planned; collective."""
        if requests[0].is_on_trial:
            found = self.group.gather("comparison", failure, self.group.members.rollouts)
            self.other_layout = next(filter(None, found), "")
        return "full" if requests[0].is_on_trial and self.other_layout else requests[0].mode

    def exchange(self, layout: TrainerLayout, requests: Sequence[WorkerRequest]) -> Exchange:
        """Return this member's exchange, planned again if layout or requests have changed; plans have to be equal."""
        facts = layout, requests[0].rollout, [request.worker for request in requests]
        if self._planned is None or self._planned[0] != facts:
            planned = self._plan(*facts)
            self._planned = facts, planned, planned.plan.digest()
        _, exchange, digest = self._planned
        if self.group.rank == 0:
            self.group.publish("plan", digest)
        elif (other := self.group.wait_for("plan")) != digest:
            raise WeightSyncError(f"this rank's plan is {digest}, that of trainer rank 0 is {other}")
        return exchange

    def _plan(self, layout: TrainerLayout, rollout: Rollout, workers: list[int]) -> Exchange:
        group, model = self.group, layout.model
        assert model is not None, "weights of other engines are sent as full tensors"
        targets, limit = Targets.separate(workers, model.topology), round_bytes(layout.settings.memory_bytes)
        return model.exchange(rollout, targets, limit, group.rank, group.device, group.process_group, group.finish)


class ReceivedWeights:
    """The weights of one sync on a rollout rank; the interface is that of ``sync.RolloutWeights``."""

    is_quantised_here = is_on_trial = False
    _requests: Sequence[WorkerRequest] = ()

    def __init__(self, endpoint: Endpoint, layout: TrainerLayout, mode: str = "full"):
        self._endpoint, self._group, self._layout, self.mode = endpoint, endpoint.group, layout, mode
        self._request, self.traffic = WorkerRequest("full", Rollout(), 0), Traffic()
        self.has_checksums = has_checksums(self._group.syncs, layout.settings.verify_syncs)

    def for_rollout(self, config: Any, worker: int) -> "ReceivedWeights":
        """Choose the mode for the worker with this index in its replica; all members raise if it can't load it."""
        mode: SyncMode = "full"
        server = server_of(config)
        requested, model = self._layout.settings.requested, self._layout.model
        if model is not None:
            # Slices are the fewest bytes for every rollout that is not colocated, so ``sliced`` never refuses.
            wanted = "full" if requested == "full" else "auto"
            mode, reason = choose_mode(wanted, config, model.heads.family, backend=BACKEND)
            if self._endpoint.other_layout:
                mode, reason = "full", self._endpoint.other_layout
            if reason and worker == 0:
                logger.warning("epfsdp2: engine.rollout_sync=%s falls back to full: %s", requested, reason)
            with self._group.abort_on_error():
                server.check_mode(config, mode, reason, BACKEND)
        is_new = mode == "sliced" and not self._endpoint.is_compared and bool(untested(config))
        self.has_checksums |= is_new
        self.is_on_trial, self._config = is_new and requested == "auto", config
        self._request = WorkerRequest(mode, server.rollout_of(config), worker, is_on_trial=self.is_on_trial)
        self.mode = mode
        self.is_quantised_here = mode == "sliced" and self._request.rollout.is_quantised
        return self

    def stages(self, config: Any, worker: int) -> Iterator[tuple["ReceivedWeights", dict[str, Any]]]:
        """Yield the weights to load one after the other, each with arguments of vLLM's worker."""
        endpoint, weights = self._endpoint, self.for_rollout(config, worker)
        if not self._layout.peft_config:
            yield weights, {}
            return
        if endpoint.has_base is None:
            endpoint.has_base = "dummy" not in str(config.get("load_format"))  # as in verl's colocated worker
        with self._group.abort_on_error():
            self._requests = endpoint.requests(replace(self._request, needs_base=not endpoint.has_base))
        arguments = {"peft_config": json.loads(self._layout.peft_config)}
        if any(request.needs_base for request in self._requests):
            endpoint.has_base = False
            yield weights, {**arguments, "base_sync_done": False}
            endpoint.has_base = True
        yield ReceivedWeights(endpoint, self._layout, "adapters"), {**arguments, "base_sync_done": True}

    def tensors(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the worker's tensors; collective over all members, even if the consumer stops early."""
        with self._group.abort_on_error():
            if not self._requests and self.mode != "adapters":
                self._requests = self._endpoint.requests(self._request)
            if self.mode != "sliced":
                yield from to_the_end(receive_buckets(self._group, self.mode, self.traffic))
                return
            yield from self._endpoint.exchange(self._layout, self._requests).named(None, self.traffic)

    __iter__ = tensors

    def planned_layouts(self) -> list[dict[str, str]]:
        """Return the planned layout of each worker of the replica (``layout/layout_check.py``)."""
        assert self._layout.model is not None
        return self._layout.model.planned_layouts(self._request.rollout)

    def check_plans(self, failure: Exception | None) -> None:
        """Raise this rank's failure, if any, as ``WeightSyncError`` on all members; see ``RolloutWeights``."""
        with self._group.abort_on_error():
            if self.is_on_trial:
                self._requests = self._requests or self._endpoint.requests(self._request)
                text = f"{untested(self._config)}: {failure}" if failure else ""
                self._endpoint.compared(self._requests, " ".join(text.split()))
            elif failure is not None:
                raise failure
        self._endpoint.is_compared = True
        if self._endpoint.other_layout:
            self.for_rollout(self._config, self._request.worker)

    def report(self, transfer: TransferStats) -> SyncReport:
        return SyncReport(self._group.syncs, self.mode, self.traffic, transfer.nbytes, transfer)


def send_buckets(group: SyncGroup, name: str, weights: Iterable[tuple[str, torch.Tensor]], limit: int) -> int:
    """Broadcast tensors from trainer rank 0 in buckets with entries published under ``name``; return the bytes."""
    sent, pending = 0, deque[dist.Work]()
    buckets = buckets_of(weights, lambda n: torch.empty(max(limit, n), dtype=torch.uint8, device=group.device))
    for number, (entries, bucket, is_last) in enumerate(buckets):
        group.publish(f"{name} bucket {number}", (entries, bucket.numel(), is_last))
        pending.append(group.broadcast(bucket))
        sent += bucket.numel()
        while len(pending) > (0 if is_last else 1):
            group.finish(pending.popleft())
    return sent


def receive_buckets(group: SyncGroup, name: str, traffic: Traffic) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a bucket's tensors on a rollout rank while the next one is in flight."""
    arriving = deque[tuple[list[Entry], torch.Tensor, dist.Work]]()
    for number in itertools.count():
        entries, nbytes, is_last = group.wait_for(f"{name} bucket {number}")
        bucket = torch.empty(nbytes, dtype=torch.uint8, device=group.device)
        arriving.append((entries, bucket, group.broadcast(bucket)))
        while len(arriving) > (0 if is_last else 1):
            entries, bucket, work = arriving.popleft()
            group.finish(work)
            traffic.received += bucket.numel()
            yield from tensors_of(entries, bucket)
        if is_last:
            return
