"""The names under which weights are exported and synced.

transformers stacks a layer's experts into fused 3-D tensors; checkpoints of most families store one matrix per expert.
Every server's loader accepts the checkpoint's names. Other names of a server are in its folder of ``rollout/``.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch

from ..compat.transformers_names import revert_weight_conversion
from .families import RENAMED_WHEN_PUBLISHED, TRANSPOSED_WHEN_PUBLISHED
from .hf_convert import converted_together, revert

__all__ = [
    "as_checkpoint",
    "as_published",
    "as_singles",
    "expert_of",
    "experts_from",
    "is_by_expert",
    "published_name",
    "shift_expert_index",
]

_STACKS = (".experts.gate_up_proj", ".experts.down_proj")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def as_singles(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]], waiting: dict[str, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of ``as_checkpoint``, with single experts where published stacks have another layout.

    Every loader of a rollout accepts these: matrices ``[I, D]`` and ``[D, I]`` of each expert instead of stacks.
    """
    is_split = model.config.model_type in TRANSPOSED_WHEN_PUBLISHED
    for name, tensor in as_checkpoint(model, tensors, waiting):
        if not is_split or not name.endswith(_STACKS):
            yield name, tensor
            continue
        module, _, own = name.rpartition(".experts.")
        parts = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,)
        for expert, matrix in enumerate(tensor):
            for part, values in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{module}.experts.{expert}.{part}.weight", values


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
    return all(expert_of(part) is not None for part in revert(model, name, torch.empty(shape, device="meta")))


def experts_from(
    model: Any, name: str, values: torch.Tensor, first: int, step: int = 1
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a stack of experts ``first``, ``first + step``, ... in the names and the layout of checkpoints.

    Tensors that belong to no single expert keep their names.
    """
    for own, tensor in as_checkpoint(model, [(name, values)]):
        yield _EXPERT.sub(lambda found: f".experts.{first + int(found[1]) * step}.", own), tensor


def as_checkpoint(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]], waiting: dict[str, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in the names and the layout of the family's Hugging Face checkpoints; keeps their order.

    Args:
        tensors: full tensors under their names in the model.
        waiting: copies of tensors that are converted together with later ones. Pass the same dict to all calls that
            share a model's tensors.

    Yields views where the layouts allow it, e.g. one matrix per expert of a stack.

    Raises:
        ValueError: tensors are left that need others, and no ``waiting`` was given.
    """
    kept: dict[str, torch.Tensor] = {} if waiting is None else waiting
    for name, tensor in tensors:
        together = converted_together(model, name)
        if len(together) == 1:
            for part, values in revert(model, name, tensor).items():
                yield published_name(model.config.model_type, part), values
            continue
        kept[name] = tensor.clone()  # the caller may use its memory again
        if all(other in kept for other in together):
            found = revert_weight_conversion(model, {other: kept.pop(other) for other in together})
            yield from ((published_name(model.config.model_type, part), values) for part, values in found.items())
    if waiting is None and kept:
        raise ValueError(f"{', '.join(kept)}: only a part of the parameters that a checkpoint's tensor is made of.")


@cache  # a sync asks for tens of thousands of names
def published_name(family: str, name: str) -> str:
    """Return the published name of a checkpoint's tensor, for the name that transformers writes."""
    for written, published in RENAMED_WHEN_PUBLISHED.get(family, ()):
        name = re.sub(written, published, name)
    return name


def as_published(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of ``as_checkpoint``, with stacks of experts as in the family's published checkpoints."""
    is_transposed = model.config.model_type in TRANSPOSED_WHEN_PUBLISHED
    for name, tensor in as_checkpoint(model, tensors):
        # transformers, which tells the layouts apart by shape, takes a square stack as it is.
        swaps = is_transposed and name.endswith(_STACKS) and tensor.shape[1] != tensor.shape[2]
        yield name, tensor.mT if swaps else tensor
