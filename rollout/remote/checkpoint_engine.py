"""verl's checkpoint engine ``epfsdp2_p2p``: weights for rollout replicas in processes of their own.

In a sync verl's ``CheckpointEngineManager`` calls ``prepare`` on every member, ``build_topology`` on the driver,
``init_process_group`` on every member, then ``send_weights`` and ``receive_weights``, then ``finalize``.
"""

import secrets
import uuid
from collections.abc import Iterable
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name

from .. import servers
from ..servers import BACKEND
from .process_group import Members, SyncGroup
from .remote_sync import Endpoint, ReceivedWeights
from .signed_store import SignedStore, connect_store, serve_store

__all__ = ["PeerToPeerCheckpointEngine"]


@CheckpointEngineRegistry.register(BACKEND)
class PeerToPeerCheckpointEngine(CheckpointEngine):
    """The checkpoint engine of a trainer or rollout rank; members keep their group until one fails or changes.

    ``bucket_size`` are bytes, for full tensors of other engines. verl passes ``is_master=None`` on a rollout rank.
    """

    _endpoint: Endpoint | None = None
    _store: dist.TCPStore | None = None
    _store_address: tuple[str, int, str] | None = None
    _identity = ""
    _identities: tuple[str, ...] = ()

    def __init__(self, bucket_size: int, is_master: bool | None = None, timeout_seconds: float = 300.0):
        self.bucket_size, self.is_master, self.timeout_seconds = bucket_size, is_master, timeout_seconds
        if is_master is None:
            servers.install(timeout_seconds)  # verl builds this rank's server adapter next

    def prepare(self) -> dict[str, Any]:
        """Return this member's identity, which changes after a failure, and trainer rank 0's store address."""
        if self._endpoint is None or self._endpoint.group.failed:
            self._leave()
            self._identity = uuid.uuid4().hex
            if self.is_master:  # a new store, since failed members may still write to the old one
                self._store = serve_store(_address(), self.timeout_seconds)
                self._store_address = _address(), self._store.port, secrets.token_hex(32)
        return {"identity": self._identity, "address": self._store_address}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of ``init_process_group`` for trainer ranks and for rollout ranks."""
        members = Members(actor_wg_world_size, actor_wg_world_size + rollout_world_size)
        identities, address = tuple(each["identity"] for each in metadata), metadata[0]["address"]

        def of(ranks: range) -> dict[str, list[Any]]:
            common = {"members": members, "identities": identities, "address": address}
            return {"rank": list(ranks)} | {name: [value] * len(ranks) for name, value in common.items()}

        return of(range(members.trainers)), of(members.rollouts)

    def init_process_group(
        self, rank: int, members: Members, identities: tuple[str, ...], address: tuple[str, int, str]
    ) -> None:
        """Join the group; ``address`` is the store's host, port and token. Raises as ``SyncGroup`` does."""
        if self._identities == identities:
            return
        host, port, token = address
        store = self._store or connect_store(host, port, self.timeout_seconds)
        self._leave()
        # A store may serve several groups in turn.
        store_of_group = SignedStore(dist.PrefixStore("/".join(identities), store), token)
        group = SyncGroup(store_of_group, rank, members, get_device_name(), self.timeout_seconds)
        self._endpoint, self._identities = Endpoint(group), identities

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        assert self._endpoint is not None, "init_process_group comes first"
        return self._endpoint.send(weights, self.bucket_size)

    def receive_weights(self, global_steps: int | None = None) -> ReceivedWeights:
        """Return the weights of one sync for the server adapter."""
        assert self._endpoint is not None, "init_process_group comes first"
        return self._endpoint.receive()

    def finalize(self) -> None:
        """Do nothing: the next sync deletes the messages of this one."""

    def _leave(self) -> None:
        if self._endpoint is not None:
            self._endpoint.group.close()
        self._endpoint, self._identities = None, ()


def _address() -> str:
    return ray.util.get_node_ip_address().strip("[]")
