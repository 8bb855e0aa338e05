"""When the sockets of a weight sync connect, and that no wait is unbounded."""

import threading
import time

import pytest
import zmq

from epfsdp2.rollout.transport import watched_sockets
from epfsdp2.rollout.transport.watched_sockets import WatchedContext, WeightSyncError


class Noted:
    """A socket that records whether its address was bound when it connected."""

    def __init__(self, path):
        self.path, self.connected = path, []

    def setsockopt(self, *_): ...

    def connect(self, address):
        self.connected.append((address, self.path.exists()))


class Context:
    def __init__(self, socket):
        self.made = socket

    def socket(self, kind):
        return self.made


def _connect(path, address):
    noted = Noted(path)
    WatchedContext(Context(noted), 1.0, "a test").socket(zmq.REP).connect(address)
    return noted.connected


@pytest.mark.parametrize(
    ("scheme", "seconds", "binds"), [("ipc", 60.0, True), ("ipc", 0.05, False), ("tcp", 60.0, False)]
)
def test_watched_socket_connects_once_the_other_end_binds_or_leaves_retries_to_zmq(
    tmp_path, monkeypatch, scheme, seconds, binds
):
    monkeypatch.setattr(watched_sockets, "_LISTENING_SECONDS", seconds)
    path, started = tmp_path / "socket", time.monotonic()
    listener = threading.Timer(0.1, path.touch if binds else lambda: None)
    listener.start()
    assert _connect(path, f"{scheme}://{path}") == [(f"{scheme}://{path}", binds)]
    assert time.monotonic() - started < 30, "only a file is waited for"
    listener.join()


def test_watched_socket_times_out_when_the_other_end_leaves_after_the_poll():
    """A worker that is killed at that moment: the socket was writable and is not any more."""

    class Left:
        def setsockopt(self, *_): ...

        def poll(self, milliseconds, event):
            time.sleep(0.01)
            return event

        def send(self, *message, flags=0):
            assert flags & zmq.NOBLOCK, "this blocks for ever"
            raise zmq.Again

        send_pyobj = recv = recv_pyobj = send

    for call in ("send", "send_pyobj", "recv", "recv_pyobj"):
        socket = WatchedContext(Context(Left()), 0.1, "a test").socket(zmq.REQ)
        with pytest.raises(WeightSyncError, match="no answer from a test within 0.1 s"):
            getattr(socket, call)(*([b""] if "send" in call else []))
