"""Find the experts modules of a Hugging Face model by what they are, not by what they are called.

transformers decorates every experts class that can be computed by a registered function
(``transformers.integrations.moe.use_experts_implementation``): instances carry ``has_gate``, ``has_bias`` and
``is_transposed``, and hold their weights stacked along dim 0, one slice per expert.
"""

import os
from dataclasses import dataclass

from torch import nn

__all__ = ["ExpertsInfo", "UnsupportedModelError", "find_experts", "is_experts", "num_experts"]

_INTERFACE_FLAGS = ("has_gate", "has_bias", "is_transposed")
# What experts of families outside transformers' experts interface are called there; only used to say why a model is
# refused (transformers 5.9: llama4, longcat_flash, granitemoe*, jetmoe, dbrx, aria, switch_transformers, nllb_moe and
# doge).
_OUTSIDE_MARKS = ("expert", "moe", "groupedgemm")


class UnsupportedModelError(ValueError):
    """The model has no experts that this engine can shard; the message says what it has instead."""


@dataclass(frozen=True)
class ExpertsInfo:
    """One experts module: its name in the model, the module, and how many experts it stacks."""

    fqn: str
    module: nn.Module
    num_experts: int


def is_experts(module: nn.Module) -> bool:
    """Whether the module is dispatched through transformers' experts interface."""
    return all(hasattr(module, flag) for flag in _INTERFACE_FLAGS) and len(_stacked(module)) >= 2


def num_experts(module: nn.Module) -> int:
    """Number of experts of an experts module: the size of dim 0 that its stacked 3-D weights share."""
    return _stacked(module)[0].shape[0]


def find_experts(model: nn.Module) -> list[ExpertsInfo]:
    """All experts modules, in the model's order.

    Raises:
        UnsupportedModelError: if there is none: the model is dense, or its experts are outside the interface.
    """
    found = [ExpertsInfo(fqn, m, num_experts(m)) for fqn, m in model.named_modules() if is_experts(m)]
    if found:
        return found
    name = type(model).__name__
    outside = _looks_like_experts(model)
    if outside:
        raise UnsupportedModelError(
            f"{name} keeps its experts in {', '.join(outside[:4])}, outside transformers' experts interface "
            "(ALL_EXPERTS_FUNCTIONS), so they can't be dispatched."
        )
    raise UnsupportedModelError(f"{name} is a dense model: it has no experts to shard.")


def _looks_like_experts(model: nn.Module) -> list[str]:
    """Classes in the model that are called experts or MoE, beyond what the whole family is called (GraniteMoe...)."""
    family = type(model).__name__
    names = {type(m).__name__ for m in model.modules()} - {family}
    own = {name: name.removeprefix(os.path.commonprefix([name, family])).lower() for name in names}
    return sorted(name for name, part in own.items() if any(mark in part for mark in _OUTSIDE_MARKS))


def _stacked(module: nn.Module) -> list[nn.Parameter]:
    """The module's own 3-D weights, if they agree on dim 0."""
    stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]
    return stacked if len({p.shape[0] for p in stacked}) == 1 else []
