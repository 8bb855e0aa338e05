"""Waits of a weight sync that time out: of ZMQ sockets, remote calls and collectives.

verl's bucketed sender and receiver block without a time-out on sockets of ``self.zmq_context`` (verl 0.9.1,
``vllm_rollout/bucketed_weight_transfer.py``). A ``WatchedContext`` replaces it and bounds their waits.
"""

import asyncio
import contextlib
import io
import os
import pickle
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import zmq

__all__ = ["CHECK_SECONDS", "WatchedContext", "WeightSyncError", "await_result", "taking_part", "wait_for_work"]

_T = TypeVar("_T")

_POLL_MILLISECONDS = 200
# A worker often connects shortly before its trainer rank binds, and ZMQ retries only after 100 to 200 ms. A shorter
# retry interval is unsafe: a socket of one sync could connect to the next sync's and receive its message.
_LISTENING_SECONDS, _LOOK_SECONDS = 1.0, 0.002
# Intervals between queries of a collective (microseconds each), and of other ranks' failures (a request to the store).
_PAUSE_SECONDS, CHECK_SECONDS = 0.0005, 0.25
# A bucket's metadata consists of these and of dtypes; ``reduce_tensor`` makes the handle of a device's buffer.
_KNOWN = {
    "torch": ("Size", "Tensor"),
    "torch.multiprocessing.reductions": ("rebuild_cuda_tensor",),
    "torch.storage": ("TypedStorage", "UntypedStorage"),
}


class WeightSyncError(RuntimeError):
    """Raised when a weight sync can't be completed; its message names the side, its progress and the cause."""


async def await_result(future: Any, timeout_seconds: float, failure: str) -> Any:
    """Return the result of an awaitable; cancel it after the time-out, and raise ``WeightSyncError(failure)``."""
    try:
        return await asyncio.wait_for(future, timeout_seconds)
    except asyncio.TimeoutError:
        raise WeightSyncError(f"{failure} within {timeout_seconds:g} s") from None


def wait_for_work(work: dist.Work, timeout_seconds: float, check: Callable[[], None] = lambda: None) -> None:
    """Wait on the host until a collective has ended on this rank; NCCL's own ``wait`` waits on the stream alone.

    Raises ``WeightSyncError`` after the time limit, and any error of ``check``, called every ``CHECK_SECONDS``.
    """
    now = time.monotonic()
    deadline, next_check = now + timeout_seconds, now + CHECK_SECONDS
    while not work.is_completed():
        now = time.monotonic()
        if now > min(deadline, next_check):
            check()
            next_check = now + CHECK_SECONDS
        if now > deadline:
            raise WeightSyncError(f"another rank took no part in a collective within {timeout_seconds:g} s")
        time.sleep(_PAUSE_SECONDS)
    work.wait()  # orders this rank's stream after it, and raises the backend's error


@contextlib.contextmanager
def taking_part(tensors: Generator[Any, None, None]) -> Iterator[None]:
    """Close ``tensors`` after the block; if it raises, join the rest of their exchange for the other ranks."""
    with contextlib.closing(tensors):
        try:
            yield
        except BaseException:
            next(tensors, None)  # because closing a generator that has not begun does nothing
            raise


@dataclass(eq=False)
class WatchedContext:
    """Replaces ``zmq.Context`` with one whose sockets raise where a plain one would block forever."""

    context: zmq.Context
    timeout_seconds: float  # longest wait of one send or receive
    waits_for: str  # name of the other end, for error messages
    check: Callable[[], None] = lambda: None  # called several times a second; raises when the other end has failed
    linger_seconds: float = 0.0  # a closed socket keeps delivering sent messages for this time
    waited_seconds: float = 0.0  # total of its sockets
    shared_memory_name: str | None = None  # in a sender's first message; verl leaks it if nobody answers

    def socket(self, kind: int) -> "_WatchedSocket":
        """Make a socket of a ZMQ type (``zmq.REQ``, ``zmq.REP``)."""
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, int(self.linger_seconds * 1000))
        return _WatchedSocket(socket, self)

    def call(self, socket: zmq.Socket, event: int, method: Callable[..., _T], *args: Any) -> _T:
        """Call a socket's method when it is ready for ``event``; raises ``WeightSyncError`` if it never is."""
        started = time.monotonic()
        while time.monotonic() < started + self.timeout_seconds:
            if socket.poll(_POLL_MILLISECONDS, event):
                with contextlib.suppress(zmq.Again):  # the other end has disconnected since the poll
                    result = method(*args, flags=zmq.NOBLOCK)
                    self.waited_seconds += time.monotonic() - started
                    return result
            self.check()
        text = f"no answer from {self.waits_for} within {self.timeout_seconds:g} s"
        raise WeightSyncError(f"{text}; it was killed, raised, or hangs")


class _WatchedSocket:
    """The methods of ``zmq.Socket`` that verl's sender and receiver call."""

    def __init__(self, socket: zmq.Socket, context: WatchedContext):
        self._socket, self._context, self._address = socket, context, ""

    def bind(self, address: str) -> None:
        self._socket.bind(address)
        if address.startswith("ipc://"):
            os.chmod(address.removeprefix("ipc://"), 0o600)  # whatever the umask: others can't connect

    def connect(self, address: str) -> None:
        """Connect once the other end has bound an ipc address, or after a second, when ZMQ retries."""
        path, until = Path(address.removeprefix("ipc://")), time.monotonic() + _LISTENING_SECONDS
        while address.startswith("ipc://") and not path.exists() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        self._address = address
        self._socket.connect(address)

    def send(self, message: bytes) -> None:
        self._context.call(self._socket, zmq.POLLOUT, self._socket.send, message)

    def send_pyobj(self, message: Any) -> None:
        if isinstance(message, dict) and "name" in message and "size" in message:
            self._context.shared_memory_name = message["name"]
        self._context.call(self._socket, zmq.POLLOUT, self._socket.send_pyobj, message)

    def recv(self) -> bytes:
        return self._context.call(self._socket, zmq.POLLIN, self._socket.recv)

    def recv_pyobj(self) -> Any:
        """Receive metadata, without running its code; refuse other messages and another user's socket."""
        message = self.recv()
        if self._address.startswith("ipc://"):
            with contextlib.suppress(FileNotFoundError):
                owner = os.stat(self._address.removeprefix("ipc://")).st_uid
                if owner not in (os.getuid(), 0):
                    raise WeightSyncError(f"the socket {self._address} belongs to another user, {owner}")
        try:
            return _Unpickler(io.BytesIO(message)).load()
        except Exception as error:  # damaged data can make pickle raise anything
            cause = f"{type(error).__name__}: {error}"
            raise WeightSyncError(f"{self._address} sent what is no metadata of a weight sync: {cause}") from error

    def close(self) -> None:
        self._socket.close()


class _Unpickler(pickle.Unpickler):
    """Reads the metadata of a bucket and refuses other pickles, because anyone could bind the socket's name first."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it would call {module}.{name}")
