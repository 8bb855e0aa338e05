"""One process group of trainer ranks and standalone rollout ranks, which belong to different torch worlds.

torch makes groups inside one world only, so this group uses private constructors, like vLLM
(``vllm/distributed/utils.py``, ``stateless_init_torch_distributed_process_group``). Its store carries small messages.
"""

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..transport.watched_sockets import CHECK_SECONDS, WeightSyncError, wait_for_work
from .messages import decode, encode

__all__ = ["Members", "SyncGroup"]

_T = TypeVar("_T")
_Text = Callable[[], str]  # the message of a time-out
_FAILURE = "failure"
# Native calls time out this much later than the group, whose error names the member.
_LATER_SECONDS, _JOIN_SECONDS = 2.0, 1.0
_NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(frozen=True)
class Members:
    """The ``world`` members of a group: first ``trainers`` trainer ranks, then rollout ranks."""

    trainers: int
    world: int

    @property
    def rollouts(self) -> range:
        return range(self.trainers, self.world)

    def name(self, rank: int) -> str:
        return f"trainer rank {rank}" if rank < self.trainers else f"rollout rank {rank - self.trainers}"


class SyncGroup:
    """A member's handle on the group; constructing it is collective.

    Every wait raises ``WeightSyncError`` with the cause if a member fails, or after ``timeout_seconds``.

    The set-up runs a collective in a thread that may never return, because NCCL opens connections in a blocking call
    without a time limit. (torch's non-blocking communicators hang with NCCL 2.26, pytorch/pytorch#153960.)

    Attributes:
        failed: whether the next sync needs another group.
        syncs: number of syncs that have begun.
    """

    process_group: dist.ProcessGroup | None = None
    _broadcast_group: dist.ProcessGroup | None = None
    _thread: threading.Thread | None = None

    def __init__(
        self, store: dist.Store, rank: int, members: Members, device: torch.device | str, timeout_seconds: float
    ):
        self.rank, self.members, self.device, self._store = rank, members, torch.device(device), store
        self.timeout_seconds, self.failed, self.syncs = timeout_seconds, False, 0
        self._limit = timedelta(seconds=timeout_seconds + _LATER_SECONDS)
        self._published, self._awaited = list[str](), list[str]()
        self._groups: list[dist.ProcessGroup] = []
        with self.abort_on_error():
            if (kind := self.device.type) not in ("cpu", "cuda"):
                raise WeightSyncError(f"weight sync uses gloo on cpu and NCCL on cuda; neither supports device {kind}")
            # A wait blocks the other requests of its connection, so waits have their own. torch's stubs lack ``clone``.
            self._blocking_store: dist.Store = store.clone()  # type: ignore[attr-defined]
            self._blocking_store.set_timeout(self._limit)
            # Open the connections of a plan's rounds: from each trainer rank to each rollout rank.
            from_trainers = [int(other < members.trainers) for other in range(members.world)]
            to_rollouts = [1 - other for other in from_trainers]
            nothing = [0] * members.world
            splits = (from_trainers, nothing) if rank in members.rollouts else (nothing, to_rollouts)
            received, sent = (torch.zeros(sum(split), dtype=torch.uint8, device=self.device) for split in splits)
            first = partial(dist.all_to_all_single, received, sent, *splits, async_op=True)
            self.process_group = self._set_up("all", range(members.world), first)

    def broadcast(self, bucket: torch.Tensor) -> dist.Work:
        """Start to broadcast ``bucket`` from trainer rank 0 to the rollout; other trainer ranks must not call it."""
        if self._broadcast_group is None:
            byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
            first = partial(dist.broadcast, byte, group_src=0, async_op=True)
            self._broadcast_group = self._set_up("from trainer 0", [0, *self.members.rollouts], first)
        return self._broadcast_group.broadcast(bucket, 0)

    def _set_up(self, name: str, ranks: Sequence[int], first: Callable[..., Any]) -> dist.ProcessGroup:
        """Make a group of ``ranks`` and run the collective ``first`` in it."""

        def set_up() -> dist.ProcessGroup:
            group = self._make_group(name, ranks.index(self.rank), len(ranks))
            self._groups.append(group)
            wait_for_work(first(group=group), self._limit.total_seconds(), self._check)
            return group

        def failure() -> str:
            if absent := self._first_missing(name, ranks):
                text = f"{absent} did not come to the group's set-up {self._in_time}: it was killed, raised or hangs"
                return f"{text}, and its own log says why"
            return (
                f"all members came to the group's set-up, which did not end {self._in_time}: one was killed or "
                "hangs since then, or they can't connect (see NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_DEBUG=INFO)"
            )

        self.gather(name, None, ranks, failure)
        return self._call(set_up, failure)

    def _make_group(self, name: str, rank: int, size: int) -> dist.ProcessGroup:
        store, is_cpu = dist.PrefixStore(name, self._blocking_store), self.device.type == "cpu"
        group = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO if is_cpu else dist.ProcessGroup.BackendType.NCCL
        backend: Any = dist.ProcessGroupGloo(store, rank, size, self._limit) if is_cpu else _nccl(store, rank, size)
        group._set_default_backend(kind)
        group._register_backend(torch.device(self.device.type), kind, backend)
        return group

    def finish(self, work: dist.Work) -> None:
        wait_for_work(work, self.timeout_seconds, self._check)

    def begin_sync(self) -> None:
        """Start the next sync and delete the messages of the one before, which has ended on every member."""
        for key in self._published:
            self._store.delete_key(key)
        self._published.clear()
        self.syncs += 1

    def publish(self, name: str, message: Any) -> None:
        """Publish a message to the other members for this sync."""
        self._published.append(f"{self.syncs}/{name}")
        self._store.set(self._published[-1], encode(message))

    def wait_for(self, name: str, failure: _Text | None = None) -> Any:
        """Return a message of this sync, once it is published."""
        key = f"{self.syncs}/{name}"
        self._wait([key], failure or (lambda: f"no other rank published {name!r} {self._in_time}"))
        return decode(self._store.get(key))

    def gather(self, name: str, message: Any, from_ranks: Sequence[int], failure: _Text | None = None) -> list[Any]:
        """Return the messages of ``from_ranks``; collective. Ranks other than trainer rank 0 read one entry."""

        def unpublished() -> str:
            missing = self._first_missing(name, from_ranks)
            late = f"{missing} did not publish its" if missing else "trainer rank 0 did not publish all"
            return f"{late} {name!r} {self._in_time}"

        if self.rank in from_ranks:
            self.publish(f"{name} {self.rank}", message)
        if self.rank == 0:
            self._wait(keys := self._keys(name, from_ranks), failure or unpublished)
            self.publish(name, [decode(self._store.get(key)) for key in keys])
        return list(self.wait_for(name, failure or unpublished))

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Leave the group if the block raises, so that all members raise ``WeightSyncError`` with the first cause."""
        try:
            yield
        except Exception as error:
            cause = self._fail(error)
            raise WeightSyncError(f"weight sync failed on {self.members.name(self.rank)}: {cause}") from error

    def _fail(self, error: Exception) -> str:
        """Publish the cause, leave the group, and return the cause of the member that failed first."""
        self.failed = True
        # torch's logger (``c10d_logger.py``) raises an error of its own, because it can't name this group.
        if isinstance(error.__context__, Exception) and "in the world group map" in str(error):
            error = error.__context__
        cause = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
        if isinstance(error, dist.DistNetworkError):
            cause = f"trainer rank 0, which serves the group's store, is gone ({cause})"
        elif "Connection" in cause:
            cause = f"another rank is gone: killed or unreachable ({cause})"
        with suppress(RuntimeError):  # the store is gone
            # Later failures are broken connections; the member that failed first has published the cause.
            if self._store.check([_FAILURE]):
                cause = str(decode(self._store.get(_FAILURE)))
            else:
                self._store.set(_FAILURE, encode(f"{self.members.name(self.rank)}: {cause}"))
        if self.rank == 0:
            time.sleep(2 * CHECK_SECONDS)  # this process serves the store, and may end after this
        self.close()
        return cause

    def _wait(self, keys: list[str], failure: _Text) -> None:
        if not self._store.check(keys):
            self._awaited = keys
            self._call(lambda: self._blocking_store.wait(keys), failure)
            self._awaited = []

    def _call(self, native: Callable[[], _T], failure: _Text) -> _T:
        """Run a call that may block for ever in a thread, and return its result; after an error the thread stays."""
        result: futures.Future[_T] = futures.Future()

        def call() -> None:
            try:
                result.set_result(native())
            except BaseException as error:
                result.set_exception(error)

        self._thread = threading.Thread(target=call, name="weight sync", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + self.timeout_seconds
        while not futures.wait([result], min(CHECK_SECONDS, max(0.0, deadline - time.monotonic()))).done:
            self._check()
            if time.monotonic() >= deadline:
                raise WeightSyncError(failure())
        return result.result()

    @property
    def _in_time(self) -> str:
        return f"within {self.timeout_seconds:g} s"

    def _keys(self, name: str, ranks: Sequence[int]) -> list[str]:
        return [f"{self.syncs}/{name} {rank}" for rank in ranks]

    def _first_missing(self, name: str, ranks: Sequence[int]) -> str:
        """Return the first rank that has not published, by bisection, which needs few requests for many ranks."""
        keys = self._keys(name, ranks)
        index = bisect_left(range(len(keys)), True, key=lambda i: not self._store.check(keys[: i + 1]))
        return self.members.name(ranks[index]) if index < len(keys) else ""

    def _check(self) -> None:
        if self._store.check([_FAILURE]):
            raise WeightSyncError(str(decode(self._store.get(_FAILURE))))

    def close(self) -> None:
        """Leave the group. With gloo, members that wait for this one fail at once; NCCL's kernels keep running."""
        with suppress(RuntimeError):  # the store is gone
            # End the thread's wait. Other waiting members decode no message, and report the published cause.
            for key in self._awaited:
                self._store.set(key, "")
        groups, self._groups, self._awaited = self._groups, [], []

        def abort() -> None:
            for group in groups:
                group.abort()

        aborting = threading.Thread(target=abort, daemon=True)
        aborting.start()
        aborting.join(self.timeout_seconds)  # because an abort of NCCL may block as long as a collective
        if self._thread is not None:  # because a native call that returns at interpreter exit aborts the process
            self._thread.join(_JOIN_SECONDS)
        self.process_group = self._broadcast_group = None


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    """Make a backend whose waits raise NCCL's errors, without torch's watchdog, which ends the process. Never run.

    ``ProcessGroupNCCL.cpp`` says of blocking waits: "no watchdog thread is created".
    """
    options = dist.ProcessGroupNCCL.Options()
    # The time-out counts from the launch of a collective, which may be long before the other members launch theirs.
    options._timeout = timedelta(days=1)
    before = {name: value for name, value in os.environ.items() if name == _NCCL_BLOCKING_WAIT}
    os.environ[_NCCL_BLOCKING_WAIT] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[_NCCL_BLOCKING_WAIT]
        os.environ.update(before)
