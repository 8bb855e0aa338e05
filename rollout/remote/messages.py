"""What the members of a sync publish for each other: the trainer's layout, and each rollout rank's request.

Nothing of the store is unpickled: messages are JSON of the types of this sync, and signed (``signed_store.py``).
"""

import dataclasses
import json
from dataclasses import dataclass
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


_TYPES = (TrainerLayout, SyncSettings, SentModel, WorkerRequest, TensorSpec, ShardStep, Topology, Heads, Rollout)
_BY_NAME: dict[str, type] = {kind.__name__: kind for kind in _TYPES}
_KIND, _DTYPE = "__kind__", "__dtype__"


def trainer_layout(weights: Any, bucket_bytes: int) -> TrainerLayout:
    if not isinstance(weights, RolloutWeights):
        return TrainerLayout(SyncSettings("full", bucket_bytes * ROUND_BUFFERS))
    adapters = json.dumps(weights.peft_config) if weights.peft_config else ""
    return TrainerLayout(weights.sync.settings, weights.sync.sent_model(), adapters)


def encode(message: Any) -> str:
    """Encode a message; its sequences are received as tuples.

    Raises:
        TypeError: it holds an object of another type.
    """
    return json.dumps(message, default=_encode_value)


def _encode_value(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if type(value) not in _TYPES:
        raise TypeError(f"{type(value).__name__} is not a message type of the weight sync")
    return {_KIND: type(value).__name__} | {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def decode(text: bytes) -> Any:
    """Decode a message.

    Raises:
        WeightSyncError: the text is not a message of these types.
    """
    try:
        return _tuples(json.loads(text, object_hook=_decode_object))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WeightSyncError(
            f"the store holds an entry that is not a message of the weight sync ({type(error).__name__}: {error})"
        ) from error


def _decode_object(found: dict[str, Any]) -> Any:
    if _DTYPE in found:
        dtype = getattr(torch, str(found[_DTYPE]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{found[_DTYPE]} is not a dtype")
        return dtype
    fields = {name: _tuples(value) for name, value in found.items()}
    return _BY_NAME[fields.pop(_KIND)](**fields) if _KIND in found else fields


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
