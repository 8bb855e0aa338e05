"""The store of a sync's process group: it listens on one address, and accepts only entries signed by the run.

torch's ``TCPStore`` listens on every interface and accepts entries of anybody. Here each entry has an HMAC (SHA-256) of
key and value under a token that members receive through Ray. This includes addresses of gloo and NCCL. Others can still
remove entries, which ends a sync with an error.
"""

import hashlib
import hmac
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..transport.watched_sockets import WeightSyncError

__all__ = ["SignedStore", "connect_store", "serve_store"]

_DIGEST = hashlib.sha256().digest_size


def serve_store(host: str, timeout_seconds: float) -> dist.TCPStore:
    """Start a store that listens on one address of this machine; raises ``WeightSyncError`` for another host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        raise WeightSyncError(f"the store of the weight sync can't listen on {host}: {error}") from error
    port, timeout = listener.getsockname()[1], timedelta(seconds=timeout_seconds)
    return dist.TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(host: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    return dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_seconds), wait_for_workers=False)


class SignedStore(dist.Store):
    """A store with signed entries; it has to outlive the backends of torch that use it."""

    def __init__(self, store: dist.Store, token: str):
        super().__init__()
        self._store, self._token = store, token

    def set(self, key: str, value: Any) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._signature(key, value) + value)

    def get(self, key: str) -> bytes:
        """Return an entry; raises ``WeightSyncError`` if no member of the run wrote it."""
        entry = self._store.get(key)
        signature, value = entry[:_DIGEST], entry[_DIGEST:]
        if not hmac.compare_digest(signature, self._signature(key, value)):
            raise WeightSyncError(f"the store's entry {key!r} is not signed with this run's token")
        return value

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    deleteKey = delete_key  # the name in torch's C++

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> "SignedStore":
        return SignedStore(self._store.clone(), self._token)  # type: ignore[attr-defined]

    def _signature(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._token.encode(), len(key).to_bytes(8, "big") + key.encode() + value, "sha256")
