"""What the members of a sync publish for each other: the trainer's layout, and each rollout rank's request."""

import json
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.topology.index_ranges import ShardStep
from ...engine.topology.mesh import Topology
from ..layout.specs import Heads, Rollout, SyncMode, TensorSpec
from ..plan.transfer_plan import round_bytes
from ..sync import RolloutWeights
from .buckets import Chunk
from .message_json import register_message_types

__all__ = ["ShardedModel", "TrainerLayout", "WorkerRequest", "trainer_layout"]


@dataclass(frozen=True)
class ShardedModel:
    """The trainer's tensors, sharding and dtypes, from which a plan is made."""

    tensors: tuple[TensorSpec, ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    layers: tuple[str, ...]
    topology: Topology
    heads: Heads


@dataclass(frozen=True)
class TrainerLayout:
    """The trainer's settings and model, as trainer rank 0 publishes them.

    Args:
        requested: the user's ``engine.rollout_sync``.
        verify_syncs: number of first syncs that carry checksums; -1 for all.
        family: ``model_type`` of the model.
        limit: bytes of a round, or of a bucket of full tensors.
        peft_config: peft's config of adapters that are sent apart from the weights, as JSON; empty where they are not.
        model: None for weights of another engine, which are sent as full tensors.
    """

    requested: str
    verify_syncs: int
    family: str
    limit: int
    model: ShardedModel | None = None
    peft_config: str = ""


@dataclass(frozen=True)
class WorkerRequest:
    """What a rollout rank requests: a sync mode, its index in its replica, and whether it lacks the weights."""

    mode: SyncMode
    rollout: Rollout
    worker: int
    needs_base: bool = True


def trainer_layout(weights: Any, bucket_bytes: int) -> TrainerLayout:
    if not isinstance(weights, RolloutWeights):
        return TrainerLayout("full", 0, "", bucket_bytes)
    sync = weights.sync
    model = ShardedModel(
        tuple(sync.tensor_specs()), tuple(sync.dtypes.items()), tuple(sync.layers), sync.meshes.topology, sync.heads
    )
    settings = sync.settings
    limit, config = round_bytes(settings.memory_bytes), json.dumps(weights.peft_config) if weights.peft_config else ""
    return TrainerLayout(settings.requested, settings.verify_syncs, sync.family, limit, model, config)


register_message_types(
    TrainerLayout, ShardedModel, WorkerRequest, Chunk, TensorSpec, ShardStep, Topology, Heads, Rollout
)
