"""When the sockets of a weight sync connect."""

import threading
import time

import pytest
import zmq

from epfsdp2.rollout.transport import watched_sockets
from epfsdp2.rollout.transport.watched_sockets import WatchedContext


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


def test_watched_socket_connects_once_the_other_end_binds(tmp_path, monkeypatch):
    monkeypatch.setattr(watched_sockets, "_LISTENING_SECONDS", 60.0)
    path = tmp_path / "socket"
    listener = threading.Timer(0.1, path.touch)
    listener.start()
    assert _connect(path, f"ipc://{path}") == [(f"ipc://{path}", True)]
    listener.join()


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_watched_socket_without_a_listener_leaves_retries_to_zmq(tmp_path, monkeypatch, scheme):
    monkeypatch.setattr(watched_sockets, "_LISTENING_SECONDS", 0.05 if scheme == "ipc" else 60.0)
    path, started = tmp_path / "socket", time.monotonic()
    assert _connect(path, f"{scheme}://{path}") == [(f"{scheme}://{path}", False)]
    assert time.monotonic() - started < 30, "only a file is waited for"
