"""The names under which vLLM's loaders take weights: the checkpoint's always, and for some families the fused ones too.

Fused ones are faster: Qwen3-30B-A3B is 531 tensors instead of 18,867, each of which scans the whole expert mapping.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...engine.compat import versions
from ...engine.model.hf_names import as_checkpoint, as_singles

__all__ = ["ADAPTED_AS_STACKS", "FUSED", "for_vllm"]

_OWN = {"gate_up_proj": "gate_up_proj", "down_proj": "down_proj"}
_LETTERED = {"gate_up_proj": "w13", "down_proj": "w2"}
# Bit-exactly in the CPU builds of vLLM 0.27 and 0.30 (tested). vLLM silently drops unknown fused names, so nothing is
# assumed: a family that is not here gets its checkpoint's names (which are fused ones for gpt_oss and gemma4), and so
# does every family before 0.27: vLLM 0.24 drops the stacks of Qwen3-MoE and fails on Mixtral's.
FUSED = dict.fromkeys(("qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "dots1", "ernie4_5_moe", "qwen3_next"), _OWN)
FUSED |= {"qwen3_5_moe_text": _OWN, "mixtral": _LETTERED, "minimax_m2": _LETTERED}
"""Families whose stacks of experts vLLM loads, and the names that it loads them under."""

ADAPTED_AS_STACKS = frozenset({"gpt_oss", "qwen3_vl_moe", "qwen3_5_moe", "qwen3_5_moe_text"})
"""Families whose experts vLLM adapts by peft's stacks (``is_3d_moe_weight`` of its classes), and not one by one."""

# Running a converter takes over a millisecond per tensor, too long for a sync of gigabytes per second.
_KNOWN: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()


def for_vllm(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]], waiting: dict[str, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors under the names that vLLM's loader of this family takes; ``waiting`` as in ``as_checkpoint``."""
    fused = FUSED.get(model.config.model_type)
    if fused is None or not _takes_stacks():
        return (yield from as_singles(model, tensors, waiting))
    known = _KNOWN.setdefault(model, {})
    for name, tensor in tensors:
        if name not in known:
            known[name] = _fused_name(model, name, tensor, fused)
        yield known[name], tensor


@cache
def _takes_stacks() -> bool:
    """Return whether the installed vLLM's loaders take fused names."""
    return versions.vllm_in(">=0.27")


def _fused_name(model: Any, name: str, tensor: torch.Tensor, stacks: Mapping[str, str]) -> str:
    parts = [part for part, _ in as_checkpoint(model, [(name, tensor.to("meta"))])]
    module, _, own = name.rpartition(".")
    if own in stacks and module.endswith(".experts"):
        # The checkpoint's module may be another one than the model's (Mixtral: block_sparse_moe, mlp).
        return f"{parts[0].rpartition('.experts.')[0]}.experts.{stacks[own]}"
    if len(parts) != 1:
        raise ValueError(f"{name} is {len(parts)} tensors in a checkpoint of {model.config.model_type}")
    return parts[0]
