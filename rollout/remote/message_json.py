"""The text of the messages that members of a weight sync exchange.

Nothing of the store is unpickled: messages are JSON of registered types, and signed (``signed_store.py``).
"""

import dataclasses
import json
from typing import Any

import torch

from ..transport.watched_sockets import WeightSyncError

__all__ = ["decode", "encode", "register_message_types"]

_MESSAGE_TYPES: dict[str, type] = {}
_KIND, _DTYPE = "__kind__", "__dtype__"


def register_message_types(*types: type) -> None:
    """Allow frozen dataclasses of these types in messages; their sequences are received as tuples."""
    _MESSAGE_TYPES.update({kind.__name__: kind for kind in types})


def encode(message: Any) -> str:
    """Encode a message.

    Raises:
        TypeError: it holds an object of a type that is not registered.
    """
    return json.dumps(message, default=_encode_value)


def _encode_value(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if not dataclasses.is_dataclass(value) or _MESSAGE_TYPES.get(type(value).__name__) is not type(value):
        raise TypeError(f"{type(value).__name__} is not a message type of the weight sync")
    return {_KIND: type(value).__name__} | {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def decode(text: bytes) -> Any:
    """Decode a message.

    Raises:
        WeightSyncError: the text is not a message of registered types.
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
    return _MESSAGE_TYPES[fields.pop(_KIND)](**fields) if _KIND in found else fields


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
