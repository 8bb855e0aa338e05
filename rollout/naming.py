"""Names under which weights leave the engine.

transformers stacks a layer's experts into fused 3-D tensors; checkpoints of most families store one matrix per expert.
vLLM's loaders take the checkpoint's names always, and for some families the fused ones too. Fused is what we want
there: Qwen3-30B-A3B is 531 tensors instead of 18,867, and vLLM's loader scans its whole expert mapping for each.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

__all__ = ["FUSED_IN_VLLM", "as_checkpoint", "for_vllm"]

# Families whose fused names ``experts.gate_up_proj`` / ``experts.down_proj`` were seen to load bit-exactly into the CPU
# builds of vLLM 0.27 and 0.30; an unknown fused name is dropped there without a word, so nothing is assumed. gpt_oss
# checkpoints are fused themselves.
FUSED_IN_VLLM = frozenset({"qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "dots1", "ernie4_5_moe", "gpt_oss"})


def for_vllm(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The names that vLLM's loader of this family takes, fused where it can; order is kept."""
    return iter(tensors) if model.config.model_type in FUSED_IN_VLLM else as_checkpoint(model, tensors)


def as_checkpoint(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and the layout of the family's Hugging Face checkpoints; order is kept.

    Args:
        tensors: full tensors under their names in the model.

    Returns:
        Views where the layouts allow it, e.g. one matrix per expert of a stack.
    """
    for name, tensor in tensors:
        yield from revert_weight_conversion(model, {name: tensor}).items()
