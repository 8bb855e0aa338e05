"""What the members of a sync publish for each other: the trainer's layout, and each rollout rank's request.

Nothing of the store is unpickled: messages are JSON of the types of this sync, and signed (``signed_store.py``).
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
    """The trainer's settings and model, as trainer rank 0 publishes them.

    Args:
        model: None for weights of another engine, which are sent as full tensors.
        peft_config: peft's config of adapters that are sent apart from the weights, as JSON; empty where they are not.
    """

    settings: SyncSettings
    model: SentModel | None = None
    peft_config: str = ""


@dataclasses.dataclass(frozen=True)
class WorkerRequest:
    """What a rollout rank requests: a sync mode, its index in its replica, and whether it lacks the weights."""

    mode: SyncMode
    rollout: Rollout
    worker: int
    needs_base: bool = True


_TYPES = (TrainerLayout, SyncSettings, SentModel, WorkerRequest, TensorSpec, ShardStep, Topology, Heads, Rollout)
_BY_NAME: dict[str, type] = {kind.__name__: kind for kind in _TYPES}
_KIND, _DTYPE = "__kind__", "__dtype__"


def trainer_layout(weights: Any, bucket_bytes: int) -> TrainerLayout:
    if not isinstance(weights, RolloutWeights):
        return TrainerLayout(SyncSettings("full", bucket_bytes * ROUND_BUFFERS))
    adapters = json.dumps(weights.peft_config) if weights.peft_config else ""
    return TrainerLayout(weights.sync.settings, weights.sync.sent_model(), adapters)


def encode(message: Any) -> str:
    """Encode a message, whose sequences become tuples; raises ``TypeError`` for an object of another type."""
    return json.dumps(message, default=_encode_value)


def _encode_value(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if type(value) not in _TYPES:
        raise TypeError(f"{type(value).__name__} is not a message type of the weight sync")
    return {_KIND: type(value).__name__} | {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def decode(text: bytes) -> Any:
    """Decode a message; raises ``WeightSyncError`` if the text is none."""
    try:
        return _decode_value(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise WeightSyncError(f"the store holds an entry that is not a message of the weight sync ({cause})") from error


def _decode_value(found: Any) -> Any:
    if isinstance(found, list):
        return tuple(map(_decode_value, found))
    if not isinstance(found, dict):
        return found
    if _DTYPE in found:
        if not isinstance(dtype := getattr(torch, str(found[_DTYPE]), None), torch.dtype):
            raise ValueError(f"{found[_DTYPE]} is not a dtype")
        return dtype
    fields = {name: _decode_value(value) for name, value in found.items()}
    return _BY_NAME[fields.pop(_KIND)](**fields) if _KIND in found else fields
