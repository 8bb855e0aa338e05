"""Trainer ranks and standalone rollout ranks as one process group.

The two are in different torch worlds: each has a default group of its own, and torch makes further groups only inside
one. So the group is put together by hand, as vLLM does for its own (``vllm/distributed/utils.py``,
``stateless_init_torch_distributed_process_group``); ``tests/rollout/test_peers.py`` fails where torch no longer allows
it. Small facts (who wants what, digests, the cause of a failure) go through the store that the group was made with.

Group ranks: the trainer's come first, in order, then the rollout's.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..transport.watched_sockets import WeightSyncError

__all__ = ["Members", "Peers", "connect", "serve", "told"]

_FAILURE = "failure"
_POLL_SECONDS = 0.01
# Whoever reaches the store's port can write to it, so facts are JSON and never unpickled: these dataclasses and dtypes.
_TOLD: dict[str, type] = {}
_KIND, _DTYPE = "__kind__", "__dtype__"


def told(*kinds: type) -> None:
    """Let members tell each other frozen dataclasses of these kinds; their sequences arrive as tuples."""
    _TOLD.update({kind.__name__: kind for kind in kinds})


@dataclass(frozen=True)
class Members:
    """Who takes part.

    Args:
        trainers: how many ranks the trainer has.
        nodes: of every member, by group rank, the node that it runs on.
    """

    trainers: int
    nodes: tuple[str, ...]

    @property
    def rollouts(self) -> range:
        """The rollout's group ranks."""
        return range(self.trainers, len(self.nodes))

    def name(self, rank: int) -> str:
        """How a message calls a member."""
        if rank < self.trainers:
            return f"trainer rank {rank}"
        return f"rollout rank {rank - self.trainers}"


def serve(host: str, timeout_seconds: float) -> dist.TCPStore:
    """Start a store that others reach at ``host`` and the store's ``port``."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)


def connect(host: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """Connect to a store that another process serves."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


class Peers:
    """One member's end of the group; made by all members together.

    Args:
        store: of trainer rank 0, served or connected to.
        rank: of this process in the group.
        timeout_seconds: longest wait for another member, in a collective or for a fact.

    Raises:
        WeightSyncError: a member did not come within the time.
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
        self._told: list[str] = []
        self.failed = False
        self.group: dist.ProcessGroup | None = None
        self._from_trainer_0: dist.ProcessGroup | None = None
        with self.guarded():
            self.group = self._make_group("all", rank, len(members.nodes))

    def broadcast(self, bucket: torch.Tensor) -> dist.Work:
        """Start to bring ``bucket`` of trainer rank 0 to every rollout rank; not for the trainer's other ranks."""
        if self._from_trainer_0 is None:
            own = 0 if self.rank == 0 else self.rank - self.members.trainers + 1
            self._from_trainer_0 = self._make_group("from trainer 0", own, len(self.members.rollouts) + 1)
        work = dist.broadcast(bucket, group_src=0, group=self._from_trainer_0, async_op=True)
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
                f"members are connected by gloo or NCCL, neither of which works on {self.device.type}"
            )
        else:
            kind = dist.ProcessGroup.BackendType.NCCL
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
        group._set_default_backend(kind)
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device(self.device.type), kind, backend)
        return group

    # -- facts ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the next sync; facts told in one are not seen in another."""
        self._syncs += 1

    def tell(self, name: str, fact: Any) -> None:
        """Let the other members know something; it is forgotten when this member calls ``end``."""
        key = f"{self._syncs}/{name}"
        self._told.append(key)
        self._set(key, fact)

    def ask(self, name: str) -> Any:
        """What a member told in this sync, waiting for it.

        Raises:
            WeightSyncError: a member failed, or nothing was told within the time.
        """
        key = f"{self._syncs}/{name}"
        deadline = time.monotonic() + self.timeout_seconds
        while not self._store.check([key]):
            if self._store.check([_FAILURE]):
                raise WeightSyncError(self._cause())
            if time.monotonic() > deadline:
                raise WeightSyncError(f"no other rank said {name!r} within {self.timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return _fact(self._store.get(key))

    def end(self) -> None:
        """The sync is over on every member."""
        for key in self._told:
            self._store.delete_key(key)
        self._told.clear()

    # -- failures -------------------------------------------------------------------------------------------------

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An error inside ends the group on this member, so that the others' waits end too, with its cause.

        Raises:
            WeightSyncError: names this member and the first cause.
        """
        try:
            yield
        except Exception as error:
            raise WeightSyncError(
                f"weight sync failed on {self.members.name(self.rank)}: {self._fail(error)}"
            ) from error

    def _fail(self, error: Exception) -> str:
        """Say the cause to all, leave the group, and return what failed first."""
        self.failed = True
        error = _unmasked(error)
        cause = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
        if isinstance(error, dist.DistNetworkError):
            cause = f"trainer rank 0 is gone, and with it the group's store ({cause})"
        elif "Connection" in cause:
            cause = f"another rank is gone, killed or out of reach ({cause})"
        try:
            # A connection that broke is how others notice a failure; whoever failed first has said so before.
            if self._store.check([_FAILURE]):
                cause = self._cause()
            else:
                self._set(_FAILURE, f"{self.members.name(self.rank)}: {cause}")
        except RuntimeError:
            pass  # the store is gone: there is nobody to say it to
        self.close()
        return cause

    def _set(self, key: str, fact: Any) -> None:
        self._store.set(key, json.dumps(fact, default=_plain))

    def _cause(self) -> str:
        return str(_fact(self._store.get(_FAILURE)))

    def close(self) -> None:
        """Leave the group: whoever waits for this member fails at once."""
        for group in (self.group, self._from_trainer_0):
            if group is not None:
                group.abort()
        self.group = self._from_trainer_0 = None


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if not dataclasses.is_dataclass(value) or _TOLD.get(type(value).__name__) is not type(value):
        raise TypeError(f"members tell each other no {type(value).__name__}")
    return {_KIND: type(value).__name__} | {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _fact(text: bytes) -> Any:
    """What ``_plain`` was made of.

    Raises:
        WeightSyncError: it is nothing that a member tells.
    """
    try:
        return _tuples(json.loads(text, object_hook=_made))
    except (ValueError, TypeError, KeyError) as error:
        raise WeightSyncError(f"the store holds what no member tells ({type(error).__name__}: {error})") from error


def _made(found: dict[str, Any]) -> Any:
    if _DTYPE in found:
        dtype = getattr(torch, str(found[_DTYPE]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{found[_DTYPE]} is no dtype")
        return dtype
    fields = {name: _tuples(value) for name, value in found.items()}
    return _TOLD[fields.pop(_KIND)](**fields) if _KIND in found else fields


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _unmasked(error: Exception) -> Exception:
    """What made a collective fail.

    Where one raises, torch's logger asks for the name of its group (``c10d_logger.py``), and of one made by hand raises
    another error in its place.
    """
    cause = error.__context__
    return cause if isinstance(cause, Exception) and "in the world group map" in str(error) else error
