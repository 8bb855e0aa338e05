"""Read the batches that verl pickles, without running code in them.

verl saves a TensorDict with ``torch.save`` (``tq_batch.pt``) or a DataProto with ``pickle`` (``gen_batch.dp``). Inert
stand-ins replace all of their classes, and torch's restricted unpickler reads tensors and plain values.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

__all__ = ["read_batch"]

_MADE = "tensordict._reductions._make_td"
_CONSOLIDATED = "tensordict._reductions._rebuild_tensordict_files_consolidated"
_DTYPES = {str(dtype): dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)}
_DTYPES |= {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


class _StandIn:
    """An object of any class: its state, and nothing that runs."""

    def __init__(self, *_: Any, **__: Any):
        self.state: Any = {}

    def __new__(cls, *_: Any, **__: Any) -> "_StandIn":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _made(_: type, state: Any) -> _StandIn:
    made = _StandIn()
    made.state = state
    return made


def _consolidated(metadata: dict[str, Any], storage: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a TensorDict whose bytes are one tensor; nested tensors are left out."""
    found = {}
    for name, (dtype, shape, start, stop, _) in metadata["leaves"].items():
        if not name.startswith("<NJT"):
            values = storage[start:stop].view(_DTYPES[dtype])
            found[name] = values[: torch.Size(shape).numel()].view(shape)
    return found


def read_batch(path: Path) -> dict[str, Any]:
    """Return a pickled batch: tensors, nested tensors and lists of plain values, each by its name.

    Raises:
        pickle.UnpicklingError, RuntimeError, OSError: it is no batch of verl, or it would run code.
    """
    if path.suffix != ".dp":
        return _plain(_load(path.open("rb"))["tensordict"])
    with path.open("rb") as file:
        state = _DataProto(file).load().state
    batch, others, _ = state
    found = _plain(_load(io.BytesIO(batch))) if batch is not None else {}
    return found | {name: value.state[-1] for name, value in others.items() if isinstance(value.state, tuple)}


def _load(file: IO[bytes]) -> Any:
    known: dict[str, Callable[..., Any]] = {_MADE: _made, _CONSOLIDATED: _consolidated}
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)  # type: ignore[arg-type]
    file.seek(0)
    with torch.serialization.safe_globals([(known.get(name, _StandIn), name) for name in names]):
        return torch.load(file, map_location="cpu", weights_only=True)


class _DataProto(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _StandIn


def _plain(value: Any) -> Any:
    """Replace stand-ins of tensordict's classes by what they hold."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if not isinstance(value, _StandIn) or not isinstance(value.state, dict):
        return value
    state = value.state
    if "tensordicts" in state:  # NonTensorStack
        return [_plain(entry) for entry in state["tensordicts"]]
    if "data" in (state.get("non_tensordict") or state.get("_non_tensordict") or {}):  # NonTensorData
        return _plain((state.get("non_tensordict") or state["_non_tensordict"])["data"])
    return _plain(state.get("_tensordict", {}))
