"""Names that vLLM's loaders accept: the checkpoint's for every family, fused ones for some.

Fused names are faster: Qwen3-30B-A3B is 531 tensors instead of 18,867, and each scans the whole expert mapping.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...engine.compat import versions
from ...engine.model.hf_names import as_checkpoint, as_singles
from ...engine.model.layers import is_mtp

__all__ = ["ADAPTED_AS_STACKS", "FUSED", "for_vllm"]

_OWN = {"gate_up_proj": "gate_up_proj", "down_proj": "down_proj"}
_LETTERED = {"gate_up_proj": "w13", "down_proj": "w2"}
# Tested to load bit for bit in the CPU builds of vLLM 0.27 and 0.30. vLLM silently drops unknown fused names, so any
# other family gets its checkpoint's names (fused ones for gpt_oss and gemma4). Before 0.27 every family does, because
# vLLM 0.24 drops the stacks of Qwen3-MoE and fails on Mixtral's.
FUSED = dict.fromkeys(("qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "dots1", "ernie4_5_moe", "qwen3_next"), _OWN)
FUSED |= {"qwen3_5_moe_text": _OWN, "mixtral": _LETTERED, "minimax_m2": _LETTERED}
"""Families whose stacked experts vLLM loads -> vLLM's names of the stacks."""

ADAPTED_AS_STACKS = frozenset({"gpt_oss", "qwen3_vl_moe", "qwen3_5_moe", "qwen3_5_moe_text"})
"""Families whose experts' adapters vLLM loads as peft's stacks (``is_3d_moe_weight``), not one by one."""

# Running a converter takes over a millisecond per tensor, too long for a sync of gigabytes per second.
_KNOWN: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()


def for_vllm(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]], waiting: dict[str, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors under names that vLLM's loader of this family accepts; ``waiting`` as in ``as_checkpoint``."""
    fused = FUSED.get(model.config.model_type)
    if fused is None or not _takes_stacks():
        return (yield from as_singles(model, tensors, waiting))
    known = _KNOWN.setdefault(model, {})
    for name, tensor in tensors:
        if is_mtp(model, name):  # drafters' loaders do not know stacks
            yield from as_singles(model, [(name, tensor)], waiting)
            continue
        if name not in known:
            known[name] = _fused_name(model, name, tensor, fused)
        yield known[name], tensor


@cache
def _takes_stacks() -> bool:
    """Whether the installed vLLM's loaders accept fused names."""
    return versions.vllm_in(">=0.27")


def _fused_name(model: Any, name: str, tensor: torch.Tensor, stacks: Mapping[str, str]) -> str:
    parts = [part for part, _ in as_checkpoint(model, [(name, tensor.to("meta"))])]
    module, _, own = name.rpartition(".")
    if own in stacks and module.endswith(".experts"):
        # The checkpoint's module may differ from the model's (Mixtral: block_sparse_moe, mlp).
        return f"{parts[0].rpartition('.experts.')[0]}.experts.{stacks[own]}"
    if len(parts) != 1:
        raise ValueError(f"{name} is {len(parts)} tensors in a checkpoint of {model.config.model_type}")
    return parts[0]
