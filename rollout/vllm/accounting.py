"""What each layer of a vLLM model has to receive during a layer-wise reload, and what it has received.

vLLM counts elements per layer and only warns when some are missing; a loader skips an expert or a name that it does not
know without a word. Imports torch alone: vLLM's own objects come as arguments.
"""

import math
from collections.abc import Collection
from typing import Any, Protocol

import torch

from ..layout.layout_check import unpadded_shape

__all__ = ["KeptCalls", "LayerRecord", "unpadded_numel"]


class LayerRecord:
    """What one layer of the model has to receive, and what it has received so far.

    Args:
        name: the layer's name in the model.
        layer: the layer, its tensors on meta, in the checkpoint's layout.
        info: vLLM's ``LayerReloadingInfo`` of the layer, right after the reload was initialised.
        never_loaded: names of tensors that vLLM does not count (``SKIP_LOAD_TENSORS``).
    """

    def __init__(self, name: str, layer: Any, info: Any, never_loaded: Collection[str]):
        self.name, self.layer, self.info = name, layer, info
        self.kernel_parameters = list(self.info.kernel_tensors[0].values())
        self.expected = {
            name: unpadded_numel(layer, name, parameter)
            for name, parameter in layer._parameters.items()
            if parameter is not None and name not in never_loaded
        }
        self.received = dict.fromkeys(layer._parameters | layer._buffers, 0)
        self.called: set[str] = set()
        self._last: str | None = None
        self._counted = 0

    def note(self, tensor_name: str | None) -> None:
        """Book what vLLM counted since the last call; it counts a tensor right after it has kept it."""
        if self._last is not None:
            self.received[self._last] = self.received.get(self._last, 0) + self.info.load_numel - self._counted
        self._last, self._counted = tensor_name, self.info.load_numel

    @property
    def is_loaded(self) -> bool:
        return not self.info.can_load()

    @property
    def is_complete(self) -> bool:
        if self.is_loaded:
            return True
        received, expected = self.counts()
        return received >= expected

    def counts(self) -> tuple[int, int]:
        """Elements of parameters received and expected, of a layer that is not loaded yet."""
        self.note(None)
        return sum(min(self.received[name], most) for name, most in self.expected.items()), sum(self.expected.values())


class Watcher(Protocol):
    """What a ``KeptCalls`` reports to."""

    loader_calls: int
    touched_storages: set[int]


class KeptCalls(list):
    """vLLM's list of the loader calls that a layer waits with; tells the reload about each."""

    def __init__(self, record: LayerRecord, reload: Watcher):
        super().__init__()
        self._record, self._reload = record, reload

    def append(self, call) -> None:
        name, arguments = call
        self._record.note(name)
        self._record.called.add(name)
        self._reload.loader_calls += 1
        for value in arguments.arguments.values():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                self._reload.touched_storages.add(value.untyped_storage().data_ptr())
        super().append(call)


def unpadded_numel(layer: Any, name: str, parameter: torch.Tensor) -> int:
    """Elements that a checkpoint holds for a parameter of this rank."""
    return math.prod(unpadded_shape(layer, name, parameter))
