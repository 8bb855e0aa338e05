"""Loads slices inside SGLang's workers: SGLang calls ``load`` for each bucket of an update that names it.

A worker's parameters have vLLM's names and layout in the families that are known (``layout/sync_mode.py``), so a slice
is copied to where it belongs, and nothing is converted. Elements are counted, and compared with their checksums after
the last bucket, as in vLLM's workers.
"""

import traceback
from typing import Any

import torch

from ..layout.layout_check import actual_layout, difference, prefix_of, rank_entry, unpadded_shape
from ..layout.slice_names import parse_slice
from ..layout.specs import Rollout
from ..transport.checksums import PlacedChecksums, ReceivedChecksums
from ..transport.watched_sockets import WeightSyncError
from .bucket import Header, synchronize, write_answer

__all__ = ["load"]

_STATE = "_epfsdp2_update"


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load one bucket, ``[(header, memory)]``, and write into it what went wrong; called by SGLang."""
    ((text, memory),) = named_tensors
    try:
        _load(model, Header.of(text), memory)
        answer = ""
    except Exception as error:
        traceback.print_exc()
        answer = f"{type(error).__name__}: {error}"
    write_answer(memory, answer)
    synchronize(memory)


@torch.no_grad()
def _load(model: Any, header: Header, memory: torch.Tensor) -> None:
    if not header.entries and not header.is_last:
        return  # another worker of the replica has more to load
    if header.layouts is not None:
        setattr(model, _STATE, _Update(model, header.layouts, header.verify))
    update: _Update | None = getattr(model, _STATE, None)
    if update is None:
        raise WeightSyncError("a bucket came before the first one of its sync, or after one that failed")
    try:
        update.load(header.tensors(memory))
        if header.is_last:
            update.finish()
            delattr(model, _STATE)
    except Exception:
        delattr(model, _STATE)
        raise


class _Update:
    """One update of a worker's model by slices.

    Raises:
        WeightSyncError: the model is laid out otherwise than the trainer plans.
    """

    def __init__(self, model: Any, layouts: list[dict[str, str]], verify: bool):
        from sglang.srt.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        if len(layouts) != size:
            raise WeightSyncError(f"the trainer plans for {len(layouts)} workers per replica; SGLang has {size}")
        layers = [
            (name, layer, {own: tensor for own, tensor in layer._parameters.items() if tensor is not None})
            for name, layer in model.named_modules()
        ]
        self._parameters = {
            prefix_of(name) + own: (layer, tensor) for name, layer, tensors in layers for own, tensor in tensors.items()
        }
        held = actual_layout(layers, rank_entry(rank, Rollout(size)), lambda name, own, is_parameter: True)
        if wrong := difference(layouts[rank], held):
            raise WeightSyncError(
                f"worker {rank} of a replica: {wrong}. engine.rollout_sync=full works without a plan."
            )
        self._received = ReceivedChecksums(verify)
        self._placed = PlacedChecksums() if verify else None
        self._names: set[str] = set()
        self._counts = dict.fromkeys(self._parameters, 0)

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Copy the slices of a bucket.

        Raises:
            WeightSyncError: a name was sent twice, or a slice does not fit.
        """
        for name, values in self._received.record(tensors):
            if name in self._names:
                raise WeightSyncError(f"the tensor {name} was sent twice in one weight sync")
            self._names.add(name)
            parameter, corner, form = parse_slice(name)
            if form or parameter not in self._parameters:
                raise WeightSyncError(f"{name} was sent, for which SGLang's model has no place on this worker")
            target = self._parameters[parameter][1].data
            extra = values.dim() - len(corner)
            if extra > 0 and values.shape[:extra].numel() == 1:  # leading dims that the parameter lacks
                values = values.reshape(values.shape[extra:])
            block = tuple(slice(low, low + size) for low, size in zip(corner, values.shape, strict=True))
            target[block].copy_(values)
            self._counts[parameter] += values.numel()
            if self._placed is not None:
                self._placed.add(parameter, corner, values.to(target.dtype))

    def finish(self) -> None:
        """Check that everything has come.

        Raises:
            WeightSyncError: elements are missing, or values differ from those that were sent.
        """
        missing = []
        for parameter, (layer, tensor) in self._parameters.items():
            shape = torch.Size(unpadded_shape(layer, parameter.rpartition(".")[2], tensor))
            if self._counts[parameter] != shape.numel():
                missing.append(f"{parameter} ({self._counts[parameter]} of {shape.numel()})")
            elif list(shape) != list(tensor.shape):
                tensor.data[shape[0] :].zero_()  # a vocabulary's padding
        if missing:
            raise WeightSyncError(
                f"{len(missing)} parameters of SGLang's model did not receive every element, first {missing[0]}"
            )
        held = ((name, tensor.detach()) for name, (_, tensor) in self._parameters.items())
        if wrong := self._received.difference() or (self._placed.difference(held) if self._placed else ""):
            raise WeightSyncError(wrong)
