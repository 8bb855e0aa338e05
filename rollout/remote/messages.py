"""Messages between the members of a sync: the trainer's layout, and each rollout rank's request.

They are JSON of known types, so that nothing is unpickled.
"""

import dataclasses
import json
from typing import Any

import torch

from ...engine.topology.index_ranges import ShardStep
from ...engine.topology.mesh import Topology
from ..layout.specs import Heads, Rollout, SyncMode, TensorSpec
from ..plan.transfer_plan import ROUND_BUFFERS
from ..sent_tensors import SentModel
from ..sync import RolloutWeights, SyncSettings
from ..transport.watched_sockets import WeightSyncError

__all__ = ["TrainerLayout", "WorkerRequest", "decode", "encode", "trainer_layout"]


@dataclasses.dataclass(frozen=True)
class TrainerLayout:
    """The trainer's settings and model, published by trainer rank 0."""

    settings: SyncSettings
    model: SentModel | None = None  # None for weights of another engine, which are sent as full tensors
    peft_config: str = ""  # JSON of peft's config for adapters that are sent apart from the weights


@dataclasses.dataclass(frozen=True)
class WorkerRequest:
    """The request of a rollout rank."""

    mode: SyncMode
    rollout: Rollout
    worker: int  # its index in its replica
    needs_base: bool = True  # whether it lacks the weights below the adapters
    is_on_trial: bool = False  # whether it gets full tensors if its layout differs from the plan


_MESSAGES = (TrainerLayout, SyncSettings, SentModel, WorkerRequest, TensorSpec, ShardStep, Topology, Heads, Rollout)
_TYPES: dict[str, type] = {kind.__name__: kind for kind in _MESSAGES}
_KIND, _DTYPE = "__kind__", "__dtype__"


def trainer_layout(weights: Any, bucket_bytes: int) -> TrainerLayout:
    if not isinstance(weights, RolloutWeights):
        return TrainerLayout(SyncSettings("full", bucket_bytes * ROUND_BUFFERS))
    adapters = json.dumps(weights.peft_config) if weights.peft_config else ""
    return TrainerLayout(weights.sync.settings, weights.sync.sent_model(), adapters)


def encode(message: Any) -> str:
    """Encode a message; its lists decode as tuples. Raises ``TypeError`` for an object of another type."""
    return json.dumps(message, default=_fields)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if type(value) not in _MESSAGES:
        raise TypeError(f"{type(value).__name__} is not a message type of the weight sync")
    return {_KIND: type(value).__name__} | {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def decode(text: bytes) -> Any:
    """Decode a message; raises ``WeightSyncError`` for any other text."""
    try:
        return _tuples(json.loads(text, object_hook=_object))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise WeightSyncError(f"the store holds an entry that is not a message of the weight sync ({cause})") from error


def _object(fields: dict[str, Any]) -> Any:
    if _DTYPE not in fields:
        return _TYPES[fields.pop(_KIND)](**{name: _tuples(value) for name, value in fields.items()})
    if not isinstance(dtype := getattr(torch, fields[_DTYPE], None), torch.dtype):
        raise ValueError(f"{fields[_DTYPE]} is not a dtype")
    return dtype


def _tuples(found: Any) -> Any:
    return tuple(map(_tuples, found)) if isinstance(found, list) else found
