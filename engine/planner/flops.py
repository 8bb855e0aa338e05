"""FLOPs of an update by a model's sizes, for verl's ``mfu``, which has formulas for some families and 0 for others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.utils.flops_counter import ESTIMATE_FUNC

from ..fsdp.unit import HEAD
from .model_sizes import ModelSizes

__all__ = ["Flops", "count_flops"]

_KNOWN: list[tuple[Any, "Flops"]] = []  # of the models in this process, by their configs


@dataclass(frozen=True)
class Flops:
    """FLOPs of a token in forward and backward, without recomputation.

    A weight that a token meets takes two in forward, two for its input's gradient, and two for its own. A frozen weight
    has no gradient. A token meets the experts that it is sent to. Vision towers, layers that draft, and the products of
    state spaces and linear attention are left out. Windows count as if attention saw all tokens before.
    """

    per_token: float
    per_pair: float  # of a token and one that its attention sees

    @classmethod
    def of(cls, sizes: ModelSizes) -> "Flops":
        layers, num_experts = sizes.traced.layers, iter(sizes.num_experts)
        units = [(stage.name, unit) for stage in sizes.stages for unit in stage.units]
        is_head_frozen = any(name == HEAD and unit.frozen for name, unit in units)
        per_token = 2.0 * (2 if is_head_frozen else 3) * sizes.outputs * sizes.head_width
        for name, unit in units:
            count = next(num_experts) if unit.is_experts else 1
            if name in layers:
                share, dims = (layers[name].rows / count, 3) if unit.is_experts else (1.0, 2)
                matrices = {own: math.prod(shape) for own, shape in unit.shapes.items() if len(shape) >= dims}
                per_token += 2 * share * sum(n * (2 if own in unit.frozen else 3) for own, n in matrices.items())
        widths = sum(layer.attention.query + layer.attention.output for layer in layers.values())
        return cls(per_token, 3 * 2 * widths)

    def of_sequences(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of an update on sequences with these numbers of tokens, each seen causally."""
        return sum(self.per_token * length + self.per_pair * length**2 / 2 for length in lengths)


def count_flops(config: Any, sizes: ModelSizes | None = None) -> None:
    """Let verl compute ``mfu`` for the family of a model's config. It is 0 as long as no sizes are known."""
    ESTIMATE_FUNC.setdefault(config.model_type, _teraflops)
    if sizes is not None and not sizes.untraced:
        _KNOWN.append((config, Flops.of(sizes)))


def _teraflops(config: Any, tokens: int, lengths: Sequence[int], seconds: float) -> float:
    """Return TFLOP/s, as verl's formulas do."""
    found = next((flops for known, flops in _KNOWN if known == config), None)
    return 0.0 if found is None else found.of_sequences(lengths) / seconds / 1e12
