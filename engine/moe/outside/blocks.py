"""Put the blocks of a family outside transformers' experts interface onto it, when a model is built.

A family is a record, ``Block``: the parameters of its block that stack the experts, and their layout. They move
unchanged into a module on the interface, ``block.experts``; flattened matrices are stacked for it. The block gets a
forward that calls this module with hidden states, expert ids and routing weights. The rest of the engine needs nothing
else for the family. If the family's experts lack transformers' decorator alone, their name in the block is the record.

The model keeps the parameters' other names or shapes (``RENAMED``, ``FLATTENED``), because checkpoints are read and
written as transformers names and shapes them.
"""

import functools
import types
from collections.abc import Callable
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
    """The experts of a family's block, and its forward; names are relative to the block.

    ``forward`` replaces the block's own. It calls ``self.experts(hidden, ids, weights)`` with ``(T, D)``, ``(T, K)``
    and ``(T, K)``, and returns the output of the block's own forward.
    """

    up: str  # the parameter ``[E, 2I, D]`` of the first linear, the gate above the rest
    down: str  # the parameter ``[E, D, I]`` of the second
    act_fn: str
    forward: Callable[..., Any]
    is_transposed: bool = False  # whether the parameters are ``[E, D, 2I]`` and ``[E, I, D]``
    gate: str = ""  # for flattened experts: the gate's parameter; ``gate``, ``up`` and ``down`` are ``[E * I, D]``
    count: str = ""  # for flattened experts: their number
    mend: Callable[[Any, Any], None] | None = None  # called first, if transformers builds the block in wrong sizes


@use_experts_implementation
class StackedExperts(nn.Module):
    """Experts on transformers' interface, with the parameters of a family's own modules."""

    def __init__(self, config: Any, up: nn.Parameter, down: nn.Parameter, act_fn: Any):
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = up, down, act_fn
        self.num_experts = up.shape[0]

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](self, hidden_states, top_k_index.clone(), top_k_weights)


def put_on_interface(model: Any, families: dict[str, Block | str]) -> None:
    """Change the blocks of a model, not sharded yet, whose class is named in ``families``; in place."""
    renamed: dict[str, str] = {}
    flattened: dict[str, Flattened] = {}
    for fqn, block in model.named_modules():
        family = families.get(type(block).__name__)
        if family is not None and not any(map(is_on_interface, block.modules())):
            name, config = fqn.rpartition(".")[2], model.config.get_text_config()
            if isinstance(family, str):
                own: Any = block.get_submodule(family)
                setattr(block, family, _decorated(own.__class__)(config, own))
                continue
            if family.mend is not None:
                family.mend(block, config)
            up, down = block.get_parameter(family.up), block.get_parameter(family.down)
            if family.gate:
                up, down, shapes = _stacked(block, family, name)
                flattened |= shapes
            else:
                moved = {family.up: "experts.gate_up_proj", family.down: "experts.down_proj"}
                renamed |= {f"{name}.{old}": f"{name}.{new}" for old, new in moved.items() if old != new}
            _replace_experts(block, family, config, up, down)
    if renamed:
        setattr(model, RENAMED, renamed)
    if flattened:
        setattr(model, FLATTENED, flattened)


@functools.cache
def _decorated(kind: Any) -> Any:
    """Return the class on the interface, built of a config and of an instance whose parameters it takes over."""

    def take_over(self: nn.Module, config: Any, own: nn.Module) -> None:
        self.__dict__.update(vars(own))

    return use_experts_implementation(type(kind.__name__, (kind,), {"__init__": take_over}))


def _stacked(block: Any, family: Block, name: str) -> tuple[nn.Parameter, nn.Parameter, dict[str, Flattened]]:
    """Stack flattened experts; return both parameters, and the layout of each by its name from the block's on."""
    gate, up, down = (block.get_parameter(own) for own in (family.gate, family.up, family.down))
    rows = down.shape[0] // attrgetter(family.count)(block)
    of_up = Flattened((f"{name}.{family.gate}", f"{name}.{family.up}"), rows)
    of_down = Flattened((f"{name}.{family.down}",), rows, is_transposed=True)
    with torch.no_grad():
        stacked = of_up.stack((gate, up)), of_down.stack((down,)).contiguous()
    shapes = {f"{name}.experts.gate_up_proj": of_up, f"{name}.experts.down_proj": of_down}
    return nn.Parameter(stacked[0]), nn.Parameter(stacked[1]), shapes


def _replace_experts(block: Any, family: Block, config: Any, up: nn.Parameter, down: nn.Parameter) -> None:
    stacked: Any = StackedExperts  # to mypy the decorator returns a module without arguments
    experts = stacked(config, up, down, attrgetter(family.act_fn)(block))
    experts.is_transposed = family.is_transposed
    for child in {own.partition(".")[0] for own in (family.gate, family.up, family.down) if own}:
        delattr(block, child)
    block.experts = experts
    block.forward = types.MethodType(family.forward, block)
