"""Names and shapes of adapters in a rollout server.

A linear has ``base_model.model.<module>.lora_A.weight`` ``[r, in]`` and ``...lora_B.weight`` ``[out, r]``, with the
checkpoint's name of the module. Experts have a pair for each matrix of an expert in the checkpoint, so the halves of a
``gate_up_proj`` share their ``A``. For some families a server loads peft's form of a stack (``peft_files.py``; vLLM
0.27, ``lora/model_manager.py``, ``_stack_moe_lora_weights``).
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch

from ..model.hf_names import expert_of, experts_from, is_by_expert
from .adapters import A, B, Lora
from .peft_files import as_peft, peft_names

__all__ = ["RolloutNames", "has_form"]

_PREFIX = "base_model.model."


def has_form(model: Any, name: str, stacked: Collection[str]) -> bool:
    """Whether the format of a server for adapters of this stack of experts is known; ``stacked`` as below."""
    return model.config.model_type in stacked or is_by_expert(model, name, model.get_parameter(name).shape)


class RolloutNames:
    """The adapters of one model in a server's format.

    Args:
        stacked: families whose experts the server adapts by peft's stacks.
    """

    def __init__(self, model: Any, lora: Lora, stacked: Collection[str]):
        self._model, self._targets, self._peft_names = model, lora.targets, peft_names(lora)
        self._is_stacked = model.config.model_type in stacked

    def tensors(self, name: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors, in the server's format, of the adapter of a weight with this name in the model.

        Args:
            a: ``[r, in]``, for a stack of experts ``[E, r, in]``.
            b: ``[out, r]``, for a stack of experts ``[E, out, r]``.
        """
        experts = self._targets[name].experts
        if experts is not None and self._is_stacked:
            yield from ((self._peft_names[name, end], as_peft(half, end, experts)) for end, half in ((A, a), (B, b)))
            return
        # B has the rows of the weight, so the weight's converter splits it too.
        for own, rows in experts_from(self._model, name, b, 0):
            module = _PREFIX + own.removesuffix(".weight")
            expert = None if experts is None else expert_of(own)
            yield f"{module}.lora_A.weight", a if expert is None else a[expert]
            yield f"{module}.lora_B.weight", rows
