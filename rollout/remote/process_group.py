"""One process group of trainer ranks and standalone rollout ranks.

The two belong to different torch worlds: each has its own default group, and torch makes further groups only inside
one. So this group is built from private constructors, as vLLM does for its own (``vllm/distributed/utils.py``,
``stateless_init_torch_distributed_process_group``); ``test_process_group.py`` fails where torch no longer
allows it. Small messages (layouts, requests, digests, the cause of a failure) go through the store of the group.

Trainer ranks come first in the group, then rollout ranks.
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
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..transport.watched_sockets import CHECK_SECONDS, WeightSyncError, wait_for_work
from .message_json import decode, encode

__all__ = ["Members", "SyncGroup"]

_T = TypeVar("_T")

_FAILURE = "failure"
# A native call's own time limit exceeds that of the group by this, so that the group's error names the member.
_LATER_SECONDS = 2.0
_JOIN_SECONDS = 1.0
# NCCL's time counts from when a collective is launched, which may be long before the others are there.
_NCCL_TIMEOUT = timedelta(days=1)
_NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(frozen=True)
class Members:
    """The members of a group.

    Args:
        trainers: number of trainer ranks.
        world: number of members.
    """

    trainers: int
    world: int

    @property
    def rollouts(self) -> range:
        """The group ranks of the rollout's members."""
        return range(self.trainers, self.world)

    def name(self, rank: int) -> str:
        """Return a member's name for error texts."""
        if rank < self.trainers:
            return f"trainer rank {rank}"
        return f"rollout rank {rank - self.trainers}"


class SyncGroup:
    """A member's handle on the group; constructing it is collective.

    A communicator is made and its connections are opened by a collective of the set-up, in a thread: NCCL does that in
    a blocking call without a time limit. (torch's non-blocking communicators hang with NCCL 2.26,
    pytorch/pytorch#153960, and have one time limit for the process.) After a set-up that failed the thread may stay in
    this call until the process ends. The group is then ``failed``, and the next sync has to make another one.

    Args:
        store: the store that trainer rank 0 serves, under the run's token (``signed_store.py``).
        rank: this process's rank in the group.
        timeout_seconds: longest wait for another member, in a collective or for a message.

    Raises:
        WeightSyncError: a member did not join in time.
    """

    def __init__(
        self, store: dist.Store, rank: int, members: Members, device: torch.device | str, timeout_seconds: float
    ):
        self.rank, self.members, self.device, self.timeout_seconds = (
            rank,
            members,
            torch.device(device),
            timeout_seconds,
        )
        self._store = store
        self._limit = timedelta(seconds=timeout_seconds + _LATER_SECONDS)
        self._syncs = 0
        self._published: list[str] = []
        self._awaited: list[str] = []
        self._groups: list[dist.ProcessGroup] = []
        self._thread: threading.Thread | None = None
        self.failed = False
        self.process_group: dist.ProcessGroup | None = None
        self._broadcast_group: dist.ProcessGroup | None = None
        with self.abort_on_error():
            if self.device.type not in ("cpu", "cuda"):
                raise WeightSyncError(
                    f"weight sync uses gloo on cpu and NCCL on cuda; neither supports device {self.device.type}"
                )
            # A wait holds its connection, which other requests would wait for. torch's stubs lack ``clone``.
            self._blocking_store: dist.Store = store.clone()  # type: ignore[attr-defined]
            self._blocking_store.set_timeout(self._limit)
            # The connections of a plan's rounds: each of the trainer's ranks sends to each of the rollout's.
            from_trainers = [int(other < members.trainers) for other in range(members.world)]
            to_rollouts = [1 - other for other in from_trainers]
            nothing = [0] * members.world
            splits = (from_trainers, nothing) if rank in members.rollouts else (nothing, to_rollouts)
            received, sent = (torch.zeros(sum(split), dtype=torch.uint8, device=self.device) for split in splits)
            self.process_group = self._set_up(
                "all",
                range(members.world),
                lambda group: dist.all_to_all_single(received, sent, *splits, group=group, async_op=True),
            )

    def broadcast(self, bucket: torch.Tensor) -> dist.Work:
        """Start to broadcast ``bucket`` from trainer rank 0 to the rollout; other trainer ranks must not call it."""
        if self._broadcast_group is None:
            byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
            self._broadcast_group = self._set_up(
                "from trainer 0",
                [0, *self.members.rollouts],
                lambda group: dist.broadcast(byte, group_src=0, group=group, async_op=True),
            )
        work = dist.broadcast(bucket, group_src=0, group=self._broadcast_group, async_op=True)
        assert work is not None
        return work

    def _set_up(self, name: str, ranks: Sequence[int], first: Callable[[dist.ProcessGroup], Any]) -> dist.ProcessGroup:
        """Make a group of ``ranks``, in which a collective that ``first`` starts has ended.

        Raises:
            WeightSyncError: it did not end in time; names the first member that did not come.
        """
        arrivals = [f"{name} has {rank}" for rank in ranks]
        all_came, deadline = f"{name} has all", time.monotonic() + self.timeout_seconds

        def set_up() -> tuple[dist.ProcessGroup, dist.Work]:
            group = self._make_group(name, ranks.index(self.rank), len(ranks))
            self._groups.append(group)
            return group, first(group)

        def failure() -> str:
            if (absent := self._first_missing(arrivals)) is not None:
                return (
                    f"{self.members.name(ranks[absent])} did not come to the group's set-up {self._in_time}: it was "
                    "killed, raised or hangs, and its own log says why"
                )
            return (
                f"all members came to the group's set-up, which did not end {self._in_time}: one was killed or "
                "hangs since then, or they can't connect (see NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_DEBUG=INFO)"
            )

        self._set(arrivals[ranks.index(self.rank)], None)
        if self._store.add(f"{name} has", 1) == len(ranks):
            self._set(all_came, None)
        self._wait([all_came], failure)
        self._check()  # see ``close``
        group, work = self._call(set_up, failure)
        wait_for_work(work, deadline - time.monotonic(), self._check, failure)
        return group

    def _make_group(self, name: str, rank: int, size: int) -> dist.ProcessGroup:
        store = dist.PrefixStore(name, self._blocking_store)
        group = dist.ProcessGroup(store, rank, size)
        backend: Any
        if self.device.type == "cpu":
            kind = dist.ProcessGroup.BackendType.GLOO
            backend = dist.ProcessGroupGloo(store, rank, size, self._limit)
        else:
            kind = dist.ProcessGroup.BackendType.NCCL
            backend = _nccl(store, rank, size)
        group._set_default_backend(kind)
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device(self.device.type), kind, backend)
        return group

    def finish(self, work: dist.Work) -> None:
        """Wait until a collective has ended on this rank, or has failed on any.

        NCCL's kernels go on when another member leaves the group: every member that sees the failure in the store
        leaves it too (``abort_on_error``).

        Raises:
            WeightSyncError: a member failed, or did not take part in time.
        """
        wait_for_work(work, self.timeout_seconds, self._check)

    # -- messages -------------------------------------------------------------------------------------------------

    def begin_sync(self) -> None:
        """Start the next sync; messages of other syncs are not visible in it."""
        self._syncs += 1

    def publish(self, name: str, message: Any) -> None:
        """Make a message available to the other members until this one calls ``end_sync``."""
        key = f"{self._syncs}/{name}"
        self._published.append(key)
        self._set(key, message)

    def wait_for(self, name: str) -> Any:
        """Wait until a member has published a message in this sync, and return it.

        Raises:
            WeightSyncError: a member failed, or nothing was published in time.
        """
        key = f"{self._syncs}/{name}"
        self._wait([key], lambda: f"no other rank published {name!r} {self._in_time}")
        return decode(self._store.get(key))

    def gather(self, name: str, message: Any, from_ranks: Sequence[int]) -> list[Any]:
        """Return the messages that ``from_ranks`` publish; collective. Each member but trainer rank 0 reads one entry.

        Args:
            message: this member's; ignored unless it is one of ``from_ranks``.

        Raises:
            WeightSyncError: a member failed, or did not publish in time; names the first that did not.
        """
        names = [f"{name} {rank}" for rank in from_ranks]
        keys = [f"{self._syncs}/{each}" for each in names]

        def failure() -> str:
            if (missing := self._first_missing(keys)) is not None:
                return f"{self.members.name(from_ranks[missing])} did not publish its {name!r} {self._in_time}"
            return f"trainer rank 0 did not publish all {name!r} {self._in_time}"

        if self.rank in from_ranks:
            self.publish(names[from_ranks.index(self.rank)], message)
        if self.rank == 0:
            self._wait(keys, failure)
            self.publish(name, [decode(self._store.get(key)) for key in keys])
        all_of_them = f"{self._syncs}/{name}"
        self._wait([all_of_them], failure)
        return list(decode(self._store.get(all_of_them)))

    def end_sync(self) -> None:
        """Delete this member's messages; call it when the sync has ended on every member."""
        for key in self._published:
            self._store.delete_key(key)
        self._published.clear()

    # -- failures -------------------------------------------------------------------------------------------------

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Leave the group if the block raises, so that the other members' waits end too, with the cause.

        Raises:
            WeightSyncError: names this member and the first cause of all members.
        """
        try:
            yield
        except Exception as error:
            raise WeightSyncError(
                f"weight sync failed on {self.members.name(self.rank)}: {self._fail(error)}"
            ) from error

    def _fail(self, error: Exception) -> str:
        """Publish the cause, leave the group, and return the cause of the member that failed first."""
        self.failed = True
        error = _root_error(error)
        cause = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
        if isinstance(error, dist.DistNetworkError):
            cause = f"trainer rank 0, which serves the group's store, is gone ({cause})"
        elif "Connection" in cause:
            cause = f"another rank is gone: killed or unreachable ({cause})"
        with suppress(RuntimeError):  # the store is gone
            # Other members notice a failure by a broken connection; the one that failed first has published its cause.
            if self._store.check([_FAILURE]):
                cause = self._published_failure()
            else:
                self._set(_FAILURE, f"{self.members.name(self.rank)}: {cause}")
        if self.rank == 0:
            time.sleep(2 * CHECK_SECONDS)  # this process, which may end now, serves the store with the cause
        self.close()
        return cause

    def _wait(self, keys: list[str], failure: Callable[[], str]) -> None:
        """Wait until the store has all ``keys``; see ``_call``."""
        if not self._store.check(keys):
            self._awaited = keys
            self._call(lambda: self._blocking_store.wait(keys), failure)
            self._awaited = []

    def _call(self, native: Callable[[], _T], failure: Callable[[], str]) -> _T:
        """Return the result of a call that may block for ever, unless a member fails or the time limit is over.

        A thread makes the call, and keeps at it after an error.

        Args:
            failure: returns what did not happen in time, for the error's text.

        Raises:
            WeightSyncError: a member failed, or the call did not return in time.
        """
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

    def _first_missing(self, keys: list[str]) -> int | None:
        """Return the index of the first key that the store does not have, by some requests for thousands of keys."""
        index = bisect_left(range(len(keys)), True, key=lambda i: not self._store.check(keys[: i + 1]))
        return index if index < len(keys) else None

    def _set(self, key: str, message: Any) -> None:
        self._store.set(key, encode(message))

    def _check(self) -> None:
        if self._store.check([_FAILURE]):
            raise WeightSyncError(self._published_failure())

    def _published_failure(self) -> str:
        return str(decode(self._store.get(_FAILURE)))

    def close(self) -> None:
        """Leave the group. With gloo, members that wait for this one fail at once; see ``finish`` for NCCL.

        This also ends the thread of ``_call``, if anything can: a native call that returns while the interpreter ends
        would abort the process.
        """
        with suppress(RuntimeError):  # the store is gone
            # Others that wait for it too find no message there, and report the cause, which was published before.
            for key in self._awaited:
                self._store.set(key, "")
        groups, self._groups, self._awaited = self._groups, [], []

        def abort() -> None:
            for group in groups:
                group.abort()

        aborting = threading.Thread(target=abort, daemon=True)
        aborting.start()
        aborting.join(self.timeout_seconds)  # torch waits for an abort of NCCL's as long as for a collective
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        self.process_group = self._broadcast_group = None


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    """Make a backend that raises NCCL's errors where they are waited for.

    By default torch's watchdog ends the process at a collective that fails or takes too long, without a word to the
    other members. A backend that is constructed with blocking waits has none, and its ``wait`` raises
    (``ProcessGroupNCCL.cpp``: "no watchdog thread is created"; in older torch one that does not end the process). Other
    backends of the process keep their own setting. Read in the source, and never run.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NCCL_TIMEOUT
    before = os.environ.get(_NCCL_BLOCKING_WAIT)
    os.environ[_NCCL_BLOCKING_WAIT] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[_NCCL_BLOCKING_WAIT]
        else:
            os.environ[_NCCL_BLOCKING_WAIT] = before


def _root_error(error: Exception) -> Exception:
    """Return the error that made a collective fail.

    When a collective raises, torch's logger looks up the name of its group (``c10d_logger.py``), which raises another
    error for a group that is not in torch's registry.
    """
    cause = error.__context__
    return cause if isinstance(cause, Exception) and "in the world group map" in str(error) else error
