"""Loss scaling for float16, and a diagnosis of models that leave its range at any scale.

float16 cannot represent gradients below 6e-8, so the loss is multiplied by a scale before backward. The gradients are
reduced in float32, and divided by the scale before they are clipped. A scale that is too large makes them infinite:
that step is skipped and the scale halved (Micikevicius et al., Mixed Precision Training, 2018).
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..topology.rank_consistency import gathered

__all__ = ["LossOverflowError", "LossScale"]

# The values of torch's GradScaler, with the interval of verl's FSDP engine.
_INITIAL, _GROWTH_INTERVAL = 2.0**16, 400
# So many halvings bring the initial scale below 1, where an overflow is no longer due to the scale.
_MOST_SKIPPED = 20


class LossOverflowError(RuntimeError):
    """Gradients in float16 are infinite at every scale."""


class LossScale:
    """The scale of the loss, equal on all ranks: a power of two, so that multiplying and dividing by it is exact.

    Args:
        layers: FQNs of the model's layers, in order; ``LossOverflowError`` names the first that overflows.
        growth_interval: number of consecutive steps without an overflow that doubles the scale.
    """

    def __init__(self, module: nn.Module, layers: Iterable[str], growth_interval: int = _GROWTH_INTERVAL):
        self.value = _INITIAL
        self._interval, self._good, self._skipped = growth_interval, 0, 0
        self._module, self._layers = module, list(layers)
        self._overflowing: set[int] = set()
        self._hooks: list[RemovableHandle] = []

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss (the name is that of torch's GradScaler, which verl's engines call)."""
        return loss * self.value

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step whose gradients were ``finite`` on all ranks, or not. Collective if it raises.

        Raises:
            LossOverflowError: on all ranks, after 20 overflows in a row; names the first layer whose output overflows.
        """
        if finite:
            self._good, self._skipped = self._good + 1, 0
            while self._hooks:
                self._hooks.pop().remove()
            if self._good == self._interval:
                self.value, self._good = self.value * 2, 0
            return
        self._good, self._skipped, self.value = 0, self._skipped + 1, self.value / 2
        if self._skipped == _MOST_SKIPPED - 1:
            self._watch()
        elif self._skipped == _MOST_SKIPPED:
            raise LossOverflowError(self._diagnosis())

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good": self._good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good = state["value"], state["good"]

    def _watch(self) -> None:
        """Record the layers whose outputs are not finite in the next step, to find the first."""
        self._overflowing.clear()

        def note(index: int, module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if not torch.isfinite(hidden.detach()).all():
                self._overflowing.add(index)

        layers = map(self._module.get_submodule, self._layers)
        self._hooks += [layer.register_forward_hook(partial(note, index)) for index, layer in enumerate(layers)]

    def _diagnosis(self) -> str:
        found = set[int]().union(*gathered(self._overflowing))
        where = "the layers' outputs are finite, and a gradient is not"
        if found:
            where = f"the output of {self._layers[min(found)]} is not finite"
        scale = f"2^{math.log2(self.value):.0f}"
        return (
            f"dtype=float16: {_MOST_SKIPPED} steps in a row were skipped, down to a scale of the loss of {scale}; "
            f"{where}. This model leaves float16's range (65,504). What works: dtype=bfloat16, or fp32_modules for "
            "what overflows."
        )
