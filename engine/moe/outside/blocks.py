"""Bring the blocks of a family outside transformers' experts interface onto it, when a model is built.

A family is data, ``Block``: which parameters of its block stack the experts, and how. They are moved, as they are, into
a module on the interface, ``block.experts``; those that the family flattens into matrices are stacked for it. The block
gets a forward that calls it with hidden states, expert ids and routing weights. From then on nothing tells the family
from one that transformers has put there: sharding, kernels, adapters, replay, losses, plans and the weight sync are
those of every family.

Where the parameters had other names or shapes, these are kept with the model (``RENAMED``, ``FLATTENED``), so that
checkpoints are read and written under the names and in the shapes that transformers gives them.
"""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...compat.transformers_names import (
    ALL_EXPERTS_FUNCTIONS,
    FLATTENED,
    RENAMED,
    Flattened,
    use_experts_implementation,
)
from ..find import is_on_interface

__all__ = ["Block", "StackedExperts", "put_on_interface"]


@dataclass(frozen=True)
class Block:
    """How a family's block holds and calls its experts; names are relative to the block.

    Args:
        up: the parameter ``[E, 2I, D]`` of the first linear, the gate above the rest.
        down: the parameter ``[E, D, I]`` of the second.
        act_fn: the activation.
        forward: of the block, in the place of its own; it calls ``self.experts(hidden, ids, weights)``, which are
            ``(T, D)``, ``(T, K)`` and ``(T, K)``, and returns what the block's own forward does.
        is_transposed: whether the parameters are ``[E, D, 2I]`` and ``[E, I, D]``.
        gate: where the family flattens its experts, the gate's parameter; it, ``up`` and ``down`` are ``[E * I, D]``.
        count: where it does, what counts the experts.
        mend: called with the block and the model's config first, where transformers builds it in wrong sizes.
    """

    up: str
    down: str
    act_fn: str
    forward: Callable[..., Any]
    is_transposed: bool = False
    gate: str = ""
    count: str = ""
    mend: Callable[[Any, Any], None] | None = None


@use_experts_implementation
class StackedExperts(nn.Module):
    """Experts on transformers' interface, of parameters that a family's own modules held."""

    def __init__(self, config: Any, up: nn.Parameter, down: nn.Parameter, act_fn: Any):
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = up, down, act_fn
        self.num_experts = up.shape[0]

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](self, hidden_states, top_k_index.clone(), top_k_weights)


def put_on_interface(model: Any, families: dict[str, Block]) -> None:
    """Change the blocks of a model, which is not sharded yet, whose class is named in ``families``; in place."""
    renamed: dict[str, str] = {}
    flattened: dict[str, Flattened] = {}
    for fqn, block in model.named_modules():
        family = families.get(type(block).__name__)
        if family is not None and not any(map(is_on_interface, block.modules())):
            name, config = fqn.rpartition(".")[2], model.config.get_text_config()
            if family.mend is not None:
                family.mend(block, config)
            if family.gate:
                flattened |= _stack_experts(block, family, config, name)
            else:
                renamed |= _move_experts(block, family, config, name)
    if renamed:
        setattr(model, RENAMED, renamed)
    if flattened:
        setattr(model, FLATTENED, flattened)


def _move_experts(block: Any, family: Block, config: Any, name: str) -> dict[str, str]:
    """Give a block its experts module; return the new name of each parameter by the old, both from the block's on."""
    up, down = block.get_parameter(family.up), block.get_parameter(family.down)
    _replace_experts(block, family, config, up, down)
    return dict(_renamed(name, family))


def _stack_experts(block: Any, family: Block, config: Any, name: str) -> dict[str, Flattened]:
    """Give a block its experts module; return by the name of each parameter of it, from the block's on, what it was."""
    flat = {own: block.get_parameter(own) for own in (family.gate, family.up, family.down)}
    rows = flat[family.down].shape[0] // attrgetter(family.count)(block)
    found = {
        "gate_up_proj": Flattened((f"{name}.{family.gate}", f"{name}.{family.up}"), rows),
        "down_proj": Flattened((f"{name}.{family.down}",), rows, is_transposed=True),
    }
    with torch.no_grad():
        up = found["gate_up_proj"].stack((flat[family.gate], flat[family.up]))
        down = found["down_proj"].stack((flat[family.down],)).contiguous()
    _replace_experts(block, family, config, nn.Parameter(up), nn.Parameter(down))
    return {f"{name}.experts.{own}": was for own, was in found.items()}


def _replace_experts(block: Any, family: Block, config: Any, up: nn.Parameter, down: nn.Parameter) -> None:
    stacked: Any = StackedExperts  # to mypy the decorator returns a module that takes nothing
    experts = stacked(config, up, down, attrgetter(family.act_fn)(block))
    experts.is_transposed = family.is_transposed
    for held in {own.partition(".")[0] for own in (family.gate, family.up, family.down) if own}:
        delattr(block, held)
    block.experts = experts
    block.forward = types.MethodType(family.forward, block)


def _renamed(name: str, family: Block) -> Iterator[tuple[str, str]]:
    for old, new in ((family.up, "experts.gate_up_proj"), (family.down, "experts.down_proj")):
        if old != new:
            yield f"{name}.{old}", f"{name}.{new}"
