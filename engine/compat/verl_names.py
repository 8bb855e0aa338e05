"""verl's names that have moved between 0.9.0, 0.9.1 and its main branch; each is looked up when it is needed."""

from collections.abc import Callable
from typing import Any

from .private_names import look_up

__all__ = ["checkpoint_callback", "quantised_model_test"]

_QUANT = "verl.utils.vllm.vllm_quant_utils"


def quantised_model_test() -> Callable[[Any], bool]:
    """Return verl's function that says whether a vLLM config quantises its model as verl's loader does."""
    return look_up(f"{_QUANT}:is_quantized_model", f"{_QUANT}:is_fp8_model", known="0.9.0 and up")


def checkpoint_callback() -> type:
    """Return the class whose subclass verl's trainers call at saves.

    Raises:
        MissingNameError: this verl has none.
    """
    without = "the trainer without recipes.resilient"
    return look_up("verl.trainer.ppo.checkpoint_callback:CheckpointCallback", known="0.9.1", instead=without)
