"""Weights of a trainer for rollout ranks that are other processes, maybe on other nodes.

The trainer says what it has and how it is cut (``Offer``); every rollout rank says what it takes (``Want``). From these
every member makes the same plan, in which the trainer's ranks are sources and the rollout's are targets, and carries
out its part: each slice goes straight from the rank that owns it to the ranks that keep it. Where one rollout rank can
take nothing but full tensors, all get them, broadcast from trainer rank 0 in bounded buckets.
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
from ..layout.layout_check import layouts
from ..layout.slice_names import placed
from ..layout.stream_choice import BACKEND, choose_stream, rollout_of
from ..layout.transfer_plan import Targets, make_plan, round_bytes
from ..layout.vllm_layout import Heads, Need, Rollout, Stream, Tensor, needs
from ..sync import RolloutSync, RolloutWeights
from ..transport.checksums import is_verified
from ..transport.exchange import Exchange, Landing
from ..transport.report import Handover, SyncReport, Traffic
from ..transport.watched_sockets import WeightSyncError
from .process_group import Peers, told
from .relay import RelayedExchange, relayed

__all__ = ["ArrivingStream", "ArrivingWeights", "Receiver", "Sender"]

logger = logging.getLogger("epfsdp2")


class _Nothing(dict):
    """The tensors of a rank that owns none: all are empty."""

    def __missing__(self, name: str) -> torch.Tensor:
        return torch.empty(0)


@dataclass(frozen=True)
class Sharded:
    """What a plan needs to know of the trainer."""

    tensors: tuple[Tensor, ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    layers: tuple[str, ...]
    topology: Topology
    heads: Heads


@dataclass(frozen=True)
class Offer:
    """What the trainer has.

    Args:
        wanted: the user's ``engine.rollout_sync``.
        verified: how many syncs carry checksums; -1 for all of them.
        family: ``model_type`` of the model.
        limit: bytes of one round, or of one bucket of full tensors.
        sharded: None for weights that are not this engine's: they are full tensors only.
    """

    wanted: str
    verified: int
    family: str
    limit: int
    sharded: Sharded | None = None


@dataclass(frozen=True)
class Want:
    """What a rollout rank takes: a stream, and where the rank is in its replica."""

    kind: Stream
    rollout: Rollout
    worker: int


def _offer(weights: Any, bucket_bytes: int) -> Offer:
    if not isinstance(weights, RolloutWeights):
        return Offer("full", 0, "", bucket_bytes)
    sync = weights.sync
    facts = Sharded(
        tuple(sync.tensors()), tuple(sync.dtypes.items()), tuple(sync.layers), sync.meshes.topology, sync.heads
    )
    settings = sync.settings
    return Offer(settings.wanted, settings.verified, sync.family, round_bytes(settings.memory_bytes), facts)


class _Road:
    """What both ends do alike."""

    def __init__(self, peers: Peers):
        self.peers = peers
        self._planned: tuple[Offer, list[Want], Exchange, str] | None = None

    def _exchange(self, offer: Offer, wants: list[Want]) -> Exchange:
        """This member's part of the plan; the plan is made again only when something about it has changed.

        Raises:
            WeightSyncError: trainer rank 0 has come to another plan.
        """
        if self._planned is None or self._planned[:2] != (offer, wants):
            exchange = self._plan(offer, wants)
            self._planned = (offer, wants, exchange, exchange.plan.digest())
        exchange, digest = self._planned[2:]
        if self.peers.rank == 0:
            self.peers.tell("plan", digest)
        elif (other := self.peers.ask("plan")) != digest:
            raise WeightSyncError(f"this rank's plan is {digest}, that of trainer rank 0 is {other}")
        return exchange

    def _plan(self, offer: Offer, wants: list[Want]) -> Exchange:
        members, sharded = self.peers.members, offer.sharded
        assert sharded is not None, "only what is sharded is sliced"

        def needs_of(tensor: Tensor, rank: int) -> list[Need]:
            if rank < members.trainers:
                return []
            want = wants[rank - members.trainers]
            return needs(tensor, want.rollout, want.worker, sharded.heads, want.kind)

        # The plan's targets are the group's ranks, so that a rank is called the same in all of it.
        targets = Targets(len(members.nodes), colocated=False)
        plan = make_plan(sharded.tensors, sharded.layers, sharded.topology, targets, needs_of, offer.limit)
        rank = self.peers.rank
        return RelayedExchange(
            relayed(plan, members.nodes),
            lambda tensor: needs_of(tensor, rank),
            rank,
            self.peers.device,
            self.peers.group,
            sources=members.trainers,
        )

    def _wants(self) -> list[Want]:
        return [self.peers.ask(f"want {rank}") for rank in self.peers.members.rollouts]


class Sender(_Road):
    """A trainer rank's end."""

    def send(self, weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> dict[str, float]:
        """Send the weights of one sync; collective over all members.

        Args:
            weights: of this engine, or full tensors of any other, which every trainer rank iterates.
            bucket_bytes: bound of a bucket of the latter.

        Returns:
            Facts of this sync, by the names under which a trainer's metrics show them: megabytes that the busiest of
            the trainer's ranks sent, and seconds. From rank 0 alone, as verl keeps one rank's.

        Raises:
            WeightSyncError: this member or another one failed.
        """
        started = time.monotonic()
        with self.peers.guarded():
            self.peers.begin()
            if self.peers.rank == 0:
                self.peers.tell("offer", _offer(weights, bucket_bytes))
            offer, wants = self.peers.ask("offer"), self._wants()
            if any(want.kind == "full" for want in wants):
                sent = self._broadcast(weights, offer.limit)
            else:
                assert isinstance(weights, RolloutWeights), "others are offered as full tensors"
                sent = self._slices(weights.sync, self._exchange(offer, wants))
        if self.peers.rank > 0:
            return {}
        return {"weight_sync/sent_megabytes": sent / 2**20, "weight_sync/seconds": time.monotonic() - started}

    def _slices(self, sync: RolloutSync, exchange: Exchange) -> int:
        for _ in exchange.run(sync.state(), sync.dtypes, values=sync.values()):
            raise AssertionError("a trainer rank receives nothing")
        return max(exchange.plan.sent.get(rank, 0) for rank in range(self.peers.members.trainers))

    def _broadcast(self, weights: Iterable[tuple[str, torch.Tensor]], limit: int) -> int:
        if self.peers.rank > 0:
            for _ in weights:
                pass  # to bring a tensor together is collective among the trainer's ranks
            return 0
        sent, index, coming = 0, 0, None
        for chunks, bucket in _buckets(weights, limit, self.peers.device):
            self.peers.tell(f"bucket {index}", chunks)
            if coming is not None:
                coming.wait()
            coming = self.peers.broadcast(bucket)
            sent, index = sent + bucket.numel(), index + 1
        self.peers.tell(f"bucket {index}", None)
        if coming is not None:
            coming.wait()
        return sent


class Receiver(_Road):
    """A rollout rank's end.

    Attributes:
        received: how many syncs have begun.
    """

    received = 0

    def receive(self) -> "ArrivingWeights":
        """The weights of one sync, which has begun when this returns.

        Raises:
            WeightSyncError: the trainer failed, or did not say what it has within the time.
        """
        with self.peers.guarded():
            self.peers.begin()
            self.received += 1
            return ArrivingWeights(self, self.peers.ask("offer"))

    def stream(
        self, offer: Offer, want: Want, traffic: Traffic, landing: Landing | None
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """See ``ArrivingWeights``; collective over all members, also where the consumer stops early."""
        with self.peers.guarded():
            self.peers.tell(f"want {self.peers.rank}", want)
            wants = self._wants()
            if any(other.kind == "full" for other in wants):
                yield from self._full(traffic)
                return
            exchange, sharded = self._exchange(offer, wants), offer.sharded
            assert sharded is not None
            arriving = exchange.run(_Nothing(), dict(sharded.dtypes), traffic, landing=landing)
            with contextlib.closing(arriving):
                for arrival in arriving:
                    wanted = needs(arrival.tensor, want.rollout, want.worker, sharded.heads, want.kind)
                    yield from placed(arrival.box, arrival.values, wanted)

    def _full(self, traffic: Traffic) -> Generator[tuple[str, torch.Tensor], None, None]:
        index, coming = 0, self._bucket(0)
        try:
            while coming is not None:
                chunks, bucket, work = coming
                index += 1
                coming = self._bucket(index)
                work.wait()
                traffic.received += bucket.numel()
                for chunk in chunks:
                    if chunk.start == 0:
                        tensor = torch.empty(chunk.shape, dtype=chunk.dtype, device=self.peers.device)
                    stop = chunk.start + chunk.nbytes
                    _bytes(tensor)[chunk.start : stop] = bucket[chunk.at : chunk.at + chunk.nbytes]
                    if stop == tensor.nbytes:
                        yield chunk.name, tensor
        finally:
            while coming is not None:
                coming[2].wait()
                index += 1
                coming = self._bucket(index)

    def _bucket(self, index: int) -> tuple[tuple["_Chunk", ...], torch.Tensor, Any] | None:
        """The next bucket under way; None after the last."""
        chunks = self.peers.ask(f"bucket {index}")
        if chunks is None:
            return None
        bucket = torch.empty(sum(c.nbytes for c in chunks), dtype=torch.uint8, device=self.peers.device)
        return chunks, bucket, self.peers.broadcast(bucket)


class ArrivingWeights:
    """The weights of one sync on a rollout rank: iterated full tensors, or what one worker takes. Use one of them."""

    def __init__(self, receiver: Receiver, offer: Offer):
        self._receiver, self._offer = receiver, offer

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ArrivingStream(self._receiver, self._offer, Want("full", Rollout(), 0)).tensors()

    def for_rollout(self, config: Any, worker: int) -> "ArrivingStream":
        """What the worker with this index in its replica takes; ``config`` is verl's rollout config.

        Slices are the fewest bytes for any rollout that is not beside the trainer, so that is what is looked for.
        """
        kind: Stream = "full"
        if self._offer.wanted != "full":
            kind, reason = choose_stream(
                "auto", config, self._offer.family, untested_vllm=versions.unknown_layout(), backend=BACKEND
            )
            if reason and worker == 0:
                logger.warning("epfsdp2: engine.rollout_sync=%s: full stream, since %s", self._offer.wanted, reason)
        return ArrivingStream(self._receiver, self._offer, Want(kind, rollout_of(config), worker))


class ArrivingStream:
    """The weights of one sync for one worker, as ``sync.WorkerStream``: full tensors where another worker can take
    nothing else."""

    def __init__(self, receiver: Receiver, offer: Offer, want: Want):
        self._receiver, self._offer, self._want = receiver, offer, want
        self.kind = want.kind
        self.is_verified = is_verified(receiver.received, offer.verified)
        self.traffic = Traffic()

    def tensors(self, landing: Landing | None = None) -> Generator[tuple[str, torch.Tensor], None, None]:
        """What the worker takes, under names that it knows; collective. Slices arrive in ``landing``."""
        return self._receiver.stream(self._offer, self._want, self.traffic, landing)

    def layouts(self) -> list[dict[str, str]]:
        """What each worker of the replica keeps, as is planned (``layout/layout_check.py``)."""
        sharded = self._offer.sharded
        assert sharded is not None, "only what is sharded is sliced"
        return layouts(sharded.tensors, self._want.rollout, sharded.heads)

    def agree(self, failure: Exception | None) -> None:
        """Have all members know what failed; that all plans are one is compared when they are made.

        Raises:
            Exception: ``failure``.
        """
        with self._receiver.peers.guarded():
            if failure is not None:
                raise failure

    def report(self, handover: Handover) -> SyncReport:
        """What there is to say at its end."""
        return SyncReport(self._receiver.received, self.kind, self.traffic, handover.nbytes, handover)


@dataclass(frozen=True)
class _Chunk:
    """Bytes of a tensor from ``start`` on, that lie in a bucket from ``at`` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    at: int
    nbytes: int


told(Offer, Sharded, Want, _Chunk, Tensor, ShardStep, Topology, Heads, Rollout)


def _buckets(
    weights: Iterable[tuple[str, torch.Tensor]], limit: int, device: torch.device
) -> Iterator[tuple[list[_Chunk], torch.Tensor]]:
    """Tensors in order, cut where a bucket of ``limit`` bytes ends."""
    bucket, used = torch.empty(limit, dtype=torch.uint8, device=device), 0
    chunks: list[_Chunk] = []
    for name, tensor in weights:
        values, start = _bytes(tensor.detach().contiguous()), 0
        while start < values.numel() or not chunks or chunks[-1].name != name:  # an empty tensor comes too
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
