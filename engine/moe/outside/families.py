"""The families outside transformers' experts interface that this engine knows, by the class of their block."""

from typing import Any

from .blocks import Block, put_on_interface
from .dbrx import DBRX
from .granitemoe import GRANITE
from .llama4 import LLAMA4

__all__ = ["OUTSIDE", "prepare"]

OUTSIDE: dict[str, Block] = {
    "DbrxFFN": DBRX,
    "GraniteMoeHybridMoE": GRANITE,
    "GraniteMoeMoE": GRANITE,
    "GraniteMoeSharedMoE": GRANITE,
    "Llama4TextMoe": LLAMA4,
}
"""Class name of a block -> how it holds and calls its experts. A module of ``model.external_lib`` may add some."""


def prepare(model: Any) -> None:
    """Bring what a model has of these onto the interface; a model without any is left as it is."""
    put_on_interface(model, OUTSIDE)
