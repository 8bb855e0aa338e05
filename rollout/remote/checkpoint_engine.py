"""verl's checkpoint engine ``epfsdp2_p2p``: weights for rollout replicas in processes of their own.

verl's ``separate_async`` and fully-async trainers have such replicas. Its stock backends (nccl, nixl, ...) broadcast
the full tensors of one trainer rank; this one sends every rollout rank what it keeps, from the ranks that own it
(``remote_sync.py``). Select it with ``actor_rollout_ref.rollout.checkpoint_engine.backend=epfsdp2_p2p``; verl imports
this module by the name that ``engine=epfsdp2`` sets for it, ``checkpoint_engine.custom_backend_module``
(``rollout/checkpoint_backend.py``).

One sync of verl's ``CheckpointEngineManager``: ``prepare`` on every member, ``build_topology`` on the driver,
``init_process_group`` on every member, then ``send_weights`` and ``receive_weights``, then ``finalize``.
"""

import uuid
from collections.abc import Iterable
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name

from .. import server_adapter
from ..layout.stream_choice import BACKEND
from .process_group import Members, Peers, connect, serve
from .remote_sync import ArrivingWeights, Receiver, Sender

__all__ = ["PeerToPeerCheckpointEngine"]


@CheckpointEngineRegistry.register(BACKEND)
class PeerToPeerCheckpointEngine(CheckpointEngine):
    """One member: a trainer rank or a rollout rank.

    The group is kept from one sync to the next as long as the members are the same and none has failed.

    Args:
        bucket_size: bytes of a bucket, for weights of another engine than ours.
        is_master: whether this is the first of the trainer's ranks; verl leaves it out on a rollout rank.
        timeout_seconds: longest wait for another member.
    """

    def __init__(self, bucket_size: int, is_master: bool | None = None, timeout_seconds: float = 300.0):
        self.bucket_size, self.is_master, self.timeout_seconds = bucket_size, is_master, timeout_seconds
        self._peers: Peers | None = None
        self._end: Sender | Receiver | None = None
        self._store: dist.TCPStore | None = None
        self._identity = ""
        self._made_of: tuple[str, ...] = ()
        if is_master is None:
            # verl builds this rank's adapter next.
            server_adapter.install(timeout_seconds)

    def prepare(self) -> dict[str, Any]:
        """Say who this member is. A member that has failed is a new one, so that everyone makes a new group."""
        if self._peers is None or self._peers.failed:
            self._leave()
            self._identity = uuid.uuid4().hex
            if self.is_master:
                # A new one, as what others may still say in the old one is of no interest.
                self._store = serve(_address(), self.timeout_seconds)
        address = (_address(), self._store.port) if self._store is not None else None
        return {"identity": self._identity, "node": _node(), "address": address}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """What ``init_process_group`` takes, for the trainer's ranks and for the rollout's."""
        world = actor_wg_world_size + rollout_world_size
        common = {
            "members": Members(actor_wg_world_size, tuple(each["node"] for each in metadata)),
            "identities": tuple(each["identity"] for each in metadata),
            "address": metadata[0]["address"],
        }

        def of(ranks: range) -> dict[str, list[Any]]:
            return {"rank": list(ranks)} | {name: [value] * len(ranks) for name, value in common.items()}

        return of(range(actor_wg_world_size)), of(range(actor_wg_world_size, world))

    def init_process_group(
        self, rank: int, members: Members, identities: tuple[str, ...], address: tuple[str, int]
    ) -> None:
        """Join the group.

        Raises:
            WeightSyncError: a member did not come within the time.
        """
        if self._made_of == identities:
            return
        store = self._store or connect(*address, self.timeout_seconds)
        self._leave()
        # More than one group may be made with one store, one after the other.
        store_of_group = dist.PrefixStore("/".join(identities), store)
        self._peers = Peers(store_of_group, rank, members, get_device_name(), self.timeout_seconds)
        self._end = (Receiver if rank in members.rollouts else Sender)(self._peers)
        self._made_of = identities

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send the weights of one sync; what it returns verl adds to the step's metrics."""
        assert isinstance(self._end, Sender), "only the trainer's ranks send"
        return self._end.send(weights, self.bucket_size)

    def receive_weights(self, global_steps: int | None = None) -> ArrivingWeights:
        """The weights of one sync, for the server adapter."""
        assert isinstance(self._end, Receiver), "only the rollout's ranks receive"
        return self._end.receive()

    def finalize(self) -> None:
        """Called on every member when all have ended well."""
        if self._peers is not None:
            self._peers.end()

    def _leave(self) -> None:
        if self._peers is not None:
            self._peers.close()
        self._peers = self._end = None
        self._made_of = ()


def _address() -> str:
    return ray.util.get_node_ip_address().strip("[]")


def _node() -> str:
    return ray.get_runtime_context().get_node_id()
