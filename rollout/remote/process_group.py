"""One process group of trainer ranks and standalone rollout ranks.

The two belong to different torch worlds: each has its own default group, and torch makes further groups only inside
one. So this group is built from private constructors, as vLLM does for its own (``vllm/distributed/utils.py``,
``stateless_init_torch_distributed_process_group``); ``test_process_group.py`` fails where torch no longer
allows it. Small messages (layouts, requests, digests, the cause of a failure) go through the store of the group.

Trainer ranks come first in the group, then rollout ranks.
"""

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..transport.watched_sockets import WeightSyncError, wait_for_work

__all__ = ["Members", "SyncGroup", "register_message_types"]

_FAILURE = "failure"
_POLL_SECONDS = 0.01
# NCCL's time counts from when a collective is launched, which may be long before the others are there.
_NCCL_TIMEOUT = timedelta(days=1)
_NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
# Nothing of the store is unpickled: messages are JSON of registered types, and signed (``signed_store.py``).
_MESSAGE_TYPES: dict[str, type] = {}
_KIND, _DTYPE = "__kind__", "__dtype__"


def register_message_types(*types: type) -> None:
    """Allow frozen dataclasses of these types in messages; their sequences are received as tuples."""
    _MESSAGE_TYPES.update({kind.__name__: kind for kind in types})


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
        self._syncs = 0
        self._published: list[str] = []
        self.failed = False
        self.process_group: dist.ProcessGroup | None = None
        self._broadcast_group: dist.ProcessGroup | None = None
        with self.abort_on_error():
            self.process_group = self._make_group("all", rank, members.world)

    def broadcast(self, bucket: torch.Tensor) -> dist.Work:
        """Start to broadcast ``bucket`` from trainer rank 0 to the rollout; other trainer ranks must not call it."""
        if self._broadcast_group is None:
            own = 0 if self.rank == 0 else self.rank - self.members.trainers + 1
            self._broadcast_group = self._make_group("from trainer 0", own, len(self.members.rollouts) + 1)
        work = dist.broadcast(bucket, group_src=0, group=self._broadcast_group, async_op=True)
        assert work is not None
        return work

    def _make_group(self, name: str, rank: int, size: int) -> dist.ProcessGroup:
        store = dist.PrefixStore(name, self._store)
        timeout = timedelta(seconds=self.timeout_seconds)
        group = dist.ProcessGroup(store, rank, size)
        backend: Any
        if self.device.type == "cpu":
            kind = dist.ProcessGroup.BackendType.GLOO
            backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        elif self.device.type != "cuda":
            raise WeightSyncError(
                f"weight sync uses gloo on cpu and NCCL on cuda; neither supports device {self.device.type}"
            )
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
        deadline = time.monotonic() + self.timeout_seconds
        while not self._store.check([key]):
            self._check()
            if time.monotonic() > deadline:
                raise WeightSyncError(f"no other rank published {name!r} within {self.timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return _decode(self._store.get(key))

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
        try:
            # Other members notice a failure by a broken connection; the one that failed first has published its cause.
            if self._store.check([_FAILURE]):
                cause = self._published_failure()
            else:
                self._set(_FAILURE, f"{self.members.name(self.rank)}: {cause}")
        except RuntimeError:
            pass  # the store is gone
        self.close()
        return cause

    def _set(self, key: str, message: Any) -> None:
        self._store.set(key, json.dumps(message, default=_encode))

    def _check(self) -> None:
        if self._store.check([_FAILURE]):
            raise WeightSyncError(self._published_failure())

    def _published_failure(self) -> str:
        return str(_decode(self._store.get(_FAILURE)))

    def close(self) -> None:
        """Leave the group. With gloo, members that wait for this one fail at once; see ``finish`` for NCCL."""
        for group in (self.process_group, self._broadcast_group):
            if group is not None:
                group.abort()
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


def _encode(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if not dataclasses.is_dataclass(value) or _MESSAGE_TYPES.get(type(value).__name__) is not type(value):
        raise TypeError(f"{type(value).__name__} is not a message type of the weight sync")
    return {_KIND: type(value).__name__} | {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _decode(text: bytes) -> Any:
    """Decode a message.

    Raises:
        WeightSyncError: the text is not a message of registered types.
    """
    try:
        return _tuples(json.loads(text, object_hook=_decode_object))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WeightSyncError(
            f"the store holds an entry that is not a message of the weight sync ({type(error).__name__}: {error})"
        ) from error


def _decode_object(found: dict[str, Any]) -> Any:
    if _DTYPE in found:
        dtype = getattr(torch, str(found[_DTYPE]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{found[_DTYPE]} is not a dtype")
        return dtype
    fields = {name: _tuples(value) for name, value in found.items()}
    return _MESSAGE_TYPES[fields.pop(_KIND)](**fields) if _KIND in found else fields


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _root_error(error: Exception) -> Exception:
    """Return the error that made a collective fail.

    When a collective raises, torch's logger looks up the name of its group (``c10d_logger.py``), which raises another
    error for a group that is not in torch's registry.
    """
    cause = error.__context__
    return cause if isinstance(cause, Exception) and "in the world group map" in str(error) else error
