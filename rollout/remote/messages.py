"""What the members of a sync publish for each other: the trainer's layout, and each rollout rank's request."""

import json
from dataclasses import dataclass
from typing import Any

from ...engine.topology.index_ranges import ShardStep
from ...engine.topology.mesh import Topology
from ..layout.specs import Heads, Rollout, SyncMode, TensorSpec
from ..plan.transfer_plan import ROUND_BUFFERS
from ..sent_tensors import SentModel
from ..sync import RolloutWeights, SyncSettings
from .message_json import register_message_types

__all__ = ["TrainerLayout", "WorkerRequest", "trainer_layout"]


@dataclass(frozen=True)
class TrainerLayout:
    """The trainer's settings and model, as trainer rank 0 publishes them.

    Args:
        model: None for weights of another engine, which are sent as full tensors.
        peft_config: peft's config of adapters that are sent apart from the weights, as JSON; empty where they are not.
    """

    settings: SyncSettings
    model: SentModel | None = None
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
        return TrainerLayout(SyncSettings("full", bucket_bytes * ROUND_BUFFERS))
    adapters = json.dumps(weights.peft_config) if weights.peft_config else ""
    return TrainerLayout(weights.sync.settings, weights.sync.sent_model(), adapters)


register_message_types(
    TrainerLayout, SyncSettings, SentModel, WorkerRequest, TensorSpec, ShardStep, Topology, Heads, Rollout
)
