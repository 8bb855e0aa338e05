"""The names under which weights are exported and synced.

transformers stacks a layer's experts into fused 3-D tensors; checkpoints of most families store one matrix per expert.
vLLM's loaders take the checkpoint's names always, and for some families the fused ones too. Fused names are faster:
Qwen3-30B-A3B is 531 tensors instead of 18,867, and vLLM's loader scans its whole expert mapping for each.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..compat import versions
from ..compat.transformers_names import revert_weight_conversion
from .families import FUSED_IN_VLLM, RENAMED_WHEN_PUBLISHED, TRANSPOSED_WHEN_PUBLISHED
from .hf_convert import converted_together, revert

__all__ = [
    "as_checkpoint",
    "as_published",
    "expert_of",
    "experts_from",
    "for_vllm",
    "is_by_expert",
    "is_of_expert",
    "shift_expert_index",
]

_STACKS = (".experts.gate_up_proj", ".experts.down_proj")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Running a converter takes over a millisecond per tensor, too long for a sync of gigabytes per second.
_KNOWN: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()


def for_vllm(
    model: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    waiting: dict[str, torch.Tensor] | None = None,
    *,
    may_be_fused: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors under the names that vLLM's loader of this family takes: fused if it can, else the checkpoint's.

    Args:
        waiting: as in ``as_checkpoint``.
        may_be_fused: False for the checkpoint's names anyway.
    """
    fused = FUSED_IN_VLLM.get(model.config.model_type)
    if fused is None or not may_be_fused or not _takes_stacks():
        named = as_checkpoint(model, tensors, waiting)
        yield from _single_experts(named) if model.config.model_type in TRANSPOSED_WHEN_PUBLISHED else named
        return
    known = _KNOWN.setdefault(model, {})
    for name, tensor in tensors:
        if name not in known:
            known[name] = _fused_name(model, name, tensor, fused)
        yield known[name], tensor


def _single_experts(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the matrices of each expert, ``[I, D]`` and ``[D, I]``, instead of stacks."""
    for name, tensor in tensors:
        module, _, own = name.rpartition(".experts.")
        if not name.endswith(_STACKS):
            yield name, tensor
            continue
        parts = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,)
        for expert, matrix in enumerate(tensor):
            for part, values in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{module}.experts.{expert}.{part}.weight", values


@cache
def _takes_stacks() -> bool:
    """Return whether the installed vLLM's loaders take fused names."""
    return versions.vllm_in(">=0.27")


def _fused_name(model: Any, name: str, tensor: torch.Tensor, stacks: Mapping[str, str]) -> str:
    """Return vLLM's name for a whole tensor of a family with fused names."""
    parts = [part for part, _ in as_checkpoint(model, [(name, tensor.to("meta"))])]
    module, _, own = name.rpartition(".")
    if own in stacks and module.endswith(".experts"):
        # The checkpoint's module may be another one than the model's (Mixtral: block_sparse_moe, mlp).
        return f"{parts[0].rpartition('.experts.')[0]}.experts.{stacks[own]}"
    if len(parts) != 1:
        raise ValueError(f"{name} is {len(parts)} tensors in a checkpoint of {model.config.model_type}")
    return parts[0]


def is_of_expert(name: str) -> bool:
    """Return whether a checkpoint's tensor belongs to a single expert."""
    return expert_of(name) is not None


def expert_of(name: str) -> int | None:
    """Return the number of the single expert that a checkpoint's tensor belongs to; None if there is none."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


def shift_expert_index(name: str, by: int) -> str:
    """Add ``by`` to the expert index in a tensor's name; return a name without one unchanged."""
    return _EXPERT.sub(lambda found: f".experts.{int(found[1]) + by}.", name)


def is_by_expert(model: Any, name: str, shape: torch.Size) -> bool:
    """Return whether checkpoints of the family store a parameter expert by expert."""
    if len(converted_together(model, name)) > 1:
        return False
    return all(is_of_expert(part) for part in revert(model, name, torch.empty(shape, device="meta")))


def experts_from(model: Any, name: str, values: torch.Tensor, first: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a stack that begins with the ``first``-th expert in the names and the layout of checkpoints.

    Tensors that belong to no single expert keep their names.
    """
    for own, tensor in as_checkpoint(model, [(name, values)]):
        yield shift_expert_index(own, first), tensor


def as_checkpoint(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]], waiting: dict[str, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in the names and the layout of the family's Hugging Face checkpoints; keeps their order.

    Args:
        tensors: full tensors under their names in the model.
        waiting: holds copies of tensors that are converted together with others which have not come yet; pass the same
            dict to all calls that share a model's tensors.

    Returns:
        Views where the layouts allow it, e.g. one matrix per expert of a stack.

    Raises:
        ValueError: tensors are left that need others, and no ``waiting`` was given.
    """
    kept: dict[str, torch.Tensor] = {} if waiting is None else waiting
    for name, tensor in tensors:
        together = converted_together(model, name)
        if len(together) == 1:
            own, published = RENAMED_WHEN_PUBLISHED.get(model.config.model_type, ("", ""))
            for part, values in revert(model, name, tensor).items():
                yield part.replace(own, published) if own else part, values
            continue
        kept[name] = tensor.clone()  # the caller may use its memory again
        if all(other in kept for other in together):
            yield from revert_weight_conversion(model, {other: kept.pop(other) for other in together}).items()
    if waiting is None and kept:
        raise ValueError(f"{', '.join(kept)}: only a part of the parameters that a checkpoint's tensor is made of.")


def as_published(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what ``as_checkpoint`` does, with stacks of experts in the layout of the family's published checkpoints."""
    is_transposed = model.config.model_type in TRANSPOSED_WHEN_PUBLISHED
    for name, tensor in as_checkpoint(model, tensors):
        # transformers, which tells the layouts apart by shape, takes a square stack as it is.
        swaps = is_transposed and name.endswith(_STACKS) and tensor.shape[1] != tensor.shape[2]
        yield name, tensor.mT if swaps else tensor
