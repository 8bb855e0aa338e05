"""Sockets of a weight sync: addresses, entries without the run's token, and pickles from strangers."""

import contextlib
import os
import pickle
import secrets
import socket
import stat
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist
import zmq
from torch.multiprocessing import reductions

from epfsdp2.rollout.remote.process_group import Members, SyncGroup
from epfsdp2.rollout.remote.signed_store import SignedStore, connect_store, serve_store
from epfsdp2.rollout.transport.watched_sockets import WatchedContext, WeightSyncError

SECONDS = 5.0


def _others() -> list[str]:
    """This machine's addresses beside loopback."""
    found = [a.address for cards in psutil.net_if_addrs().values() for a in cards if a.family == socket.AF_INET]
    return [address for address in found if address != "127.0.0.1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_store_listens_on_its_address_alone(host):
    if host == "::1" and not any(a.address == "::1" for a in psutil.net_if_addrs().get("lo", ())):
        pytest.skip("no IPv6 on this machine's loopback")
    store = serve_store(host, SECONDS)
    listening = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert {at.ip for at in listening if at.port == store.port} == {host}
    for other in _others():
        with pytest.raises(OSError), socket.create_connection((other, store.port), timeout=2):
            pass
    connect_store(host, store.port, SECONDS).set("a", "b")
    assert store.get("a") == b"b"


def test_store_of_an_address_that_is_not_this_machines_is_refused():
    with pytest.raises(WeightSyncError, match="can't listen on 192.0.2.1"):
        serve_store("192.0.2.1", SECONDS)


@pytest.mark.parametrize("written", [b"", b"x" * 31, b"x" * 100, b'{"a": 1}', "another token", "another key"])
def test_store_entry_without_the_runs_signature_is_refused(written):
    inner, token = dist.HashStore(), secrets.token_hex(32)
    store = SignedStore(inner, token)
    store.set("key", "value")
    assert store.get("key") == b"value"
    if written == "another token":
        SignedStore(inner, secrets.token_hex(32)).set("key", "value")
    elif written == "another key":
        store.set("other", "value")
        inner.set("key", inner.get("other"))
    else:
        inner.set("key", written)
    with pytest.raises(WeightSyncError, match="'key' is not signed with this run's token"):
        store.get("key")


def test_sync_group_excludes_a_stranger_without_the_runs_token():
    served, members = serve_store("127.0.0.1", SECONDS), Members(1, 2)
    stores = [SignedStore(served, secrets.token_hex(32)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(SyncGroup, stores[rank], rank, members, "cpu", 2.0) for rank in range(2)]:
            with pytest.raises(WeightSyncError, match="token|imed out|time"):
                one.result()


class _Runs:
    ran = False

    def __reduce__(self):
        return setattr, (_Runs, "ran", True)


@contextlib.contextmanager
def _connected(path):
    """A worker's socket, and a plain one that a stranger has bound to its name."""
    address, context = f"ipc://{path}", zmq.Context()
    sender = context.socket(zmq.REQ)
    sender.bind(address)
    receiver = WatchedContext(context, SECONDS, "a test").socket(zmq.REP)
    receiver.connect(address)
    try:
        yield sender, receiver
    finally:
        sender.close(0), receiver.close(), context.term()


HANDLE = (torch.Tensor, torch.Size([4]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0, b"x" * 64, 4, 0, False)
METADATA = [
    {"name": "verl_weights_ab", "size": 1 << 20},
    {"bucket_meta": {"a": {"shape": torch.Size([2, 3]), "dtype": torch.bfloat16, "handle": None}}, "is_last": True},
    (reductions.rebuild_cuda_tensor, HANDLE),
]


def test_watched_socket_with_bucket_metadata_reads_it_as_it_was_sent(tmp_path):
    with _connected(tmp_path / "socket") as (sender, receiver):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            for message in METADATA[: 3 if protocol > 2 else 2]:
                sender.send(pickle.dumps(message, protocol))
                assert receiver.recv_pyobj() == message
                receiver.send(b"")
                sender.recv()


@pytest.mark.parametrize(
    "message",
    [
        pickle.dumps(_Runs()),
        pickle.dumps({"bucket_meta": _Runs()}),
        b"cos\nsystem\n(S'true'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch.multiprocessing.reductions\nrebuild_storage_fd\n.",
        b"",
        b"\x80\x05.",
        b"not a pickle",
        pickle.dumps(METADATA[1])[:-9],
        b"\x80\x04]" + b"(" * 100_000,
    ],
)
def test_watched_socket_with_a_pickled_message_runs_nothing_of_it(tmp_path, message):
    with _connected(tmp_path / "socket") as (sender, receiver):
        sender.send(message)
        with pytest.raises(WeightSyncError, match="no metadata of a weight sync"):
            receiver.recv_pyobj()
    assert not _Runs.ran


def test_watched_socket_of_another_user_is_refused(tmp_path, monkeypatch):
    with _connected(tmp_path / "socket") as (sender, receiver):
        sender.send_pyobj(METADATA[1])
        assert receiver.recv_pyobj() == METADATA[1]
        receiver.send(b"")
        sender.recv()
        sender.send_pyobj(METADATA[1])
        os.chown(tmp_path / "socket", 4321, -1) if os.getuid() == 0 else monkeypatch.setattr(os, "getuid", lambda: 4321)
        with pytest.raises(WeightSyncError, match="belongs to another user"):
            receiver.recv_pyobj()


def test_watched_socket_when_bound_is_its_users_alone(tmp_path):
    path, before = tmp_path / "socket", os.umask(0)
    try:
        bound = WatchedContext(zmq.Context(), SECONDS, "a test").socket(zmq.REQ)
        bound.bind(f"ipc://{path}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    bound.close()
