"""Counts the elements that each layer of a vLLM model has received during a layer-wise reload.

vLLM counts elements per layer but only warns when some are missing, and a loader silently skips an expert or a name
that it does not know. Imports torch only; vLLM's objects are passed as arguments.
"""

import math
from collections.abc import Collection
from typing import Any, Protocol

import torch

from ..layout.layout_check import unpadded_shape

__all__ = ["CountingCallList", "LayerRecord"]


class LayerRecord:
    """The elements that one layer expects and has received.

    Args:
        name: the layer's name in the model.
        layer: the layer, with its tensors on meta in the checkpoint's layout.
        info: vLLM's ``LayerReloadingInfo`` of the layer, right after the reload was initialized.
        never_loaded: names of tensors that vLLM does not count (``SKIP_LOAD_TENSORS``).

    Attributes:
        shapes: of the layer's parameters, without padding.
        expected: the number of elements of each parameter that vLLM waits for.
        received: the number of elements that each tensor has received.
        units: memory that collects the units of a parameter, by its name in the layer.
    """

    def __init__(self, name: str, layer: Any, info: Any, never_loaded: Collection[str]):
        self.name, self.layer, self.info = name, layer, info
        self.kernel_parameters = list(self.info.kernel_tensors[0].values())
        self.shapes = {
            name: unpadded_shape(layer, name, parameter)
            for name, parameter in layer._parameters.items()
            if parameter is not None
        }
        self.expected = {name: math.prod(shape) for name, shape in self.shapes.items() if name not in never_loaded}
        self.received = dict.fromkeys(layer._parameters | layer._buffers, 0)
        self.units: dict[str, torch.Tensor] = {}
        self.called: set[str] = set()
        self._last: str | None = None
        self._counted = 0

    def count_call(self, tensor_name: str | None) -> None:
        """Count a loader call for a tensor, or None to end counting.

        vLLM counts a call after appending it to its list, so the elements counted since the last call belong to that
        one.
        """
        if self._last is not None:
            self.received[self._last] = self.received.get(self._last, 0) + self.info.load_numel - self._counted
        self._last, self._counted = tensor_name, self.info.load_numel

    @property
    def is_loaded(self) -> bool:
        """Whether vLLM has loaded and processed the layer."""
        return not self.info.can_load()

    @property
    def is_complete(self) -> bool:
        """Whether the layer is loaded or has received every element."""
        if self.is_loaded:
            return True
        received, expected = self.counts()
        return received >= expected

    def counts(self) -> tuple[int, int]:
        """Return the elements of parameters received and expected, for a layer that is not loaded yet."""
        self.count_call(None)
        return sum(min(self.received[name], most) for name, most in self.expected.items()), sum(self.expected.values())


class LoaderCallObserver(Protocol):
    """Receives the loader calls that a ``CountingCallList`` sees."""

    loader_calls: int
    touched_storages: set[int]


class CountingCallList(list):
    """Replaces vLLM's list of a layer's deferred loader calls, and counts each call that is appended."""

    def __init__(self, record: LayerRecord, reload: LoaderCallObserver):
        super().__init__()
        self._record, self._reload = record, reload

    def append(self, call) -> None:
        name, arguments = call
        self._record.count_call(name)
        self._record.called.add(name)
        self._reload.loader_calls += 1
        for value in arguments.arguments.values():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                self._reload.touched_storages.add(value.untyped_storage().data_ptr())
        super().append(call)
