"""One optimizer over parameters of different meshes.

Fused and foreach kernels take tensors of one mesh, so each mesh gets an optimizer of its own. To verl and to learning
rate schedulers ``MultiOptimizer`` is one ``torch.optim.Optimizer``: its ``param_groups`` and its ``state`` are theirs.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .shards import is_expert_parameter

__all__ = ["MultiOptimizer", "build_multi_optimizer"]


class MultiOptimizer(Optimizer):
    """Steps several optimizers as one.

    Args:
        optimizers: by name; their parameters must not overlap.
    """

    def __init__(self, optimizers: dict[str, Optimizer]):
        if not optimizers:
            raise ValueError("MultiOptimizer needs at least one optimizer.")
        self.optimizers: dict[str, Optimizer] = {}
        super().__init__([p for o in optimizers.values() for group in o.param_groups for p in group["params"]], {})
        self.optimizers = optimizers

    # Read from the inner optimizers each time: their load_state_dict replaces these objects. torch.optim.Optimizer
    # assigns both in its __init__, which the setters ignore.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers: a scheduler that sets ``lr`` here sets it there."""
        return [group for o in self.optimizers.values() for group in o.param_groups]

    @param_groups.setter
    def param_groups(self, _groups: list[dict[str, Any]]) -> None: ...

    @property
    def state(self) -> Any:
        """The state of all optimizers, by parameter."""
        return _ChainedState(list(self.optimizers.values()))

    @state.setter
    def state(self, _state: MutableMapping[Any, Any]) -> None: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """State of each optimizer under its name; ``checkpoint`` saves by parameter name instead."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if set(state_dict) != set(self.optimizers):
            raise ValueError(f"The state is of {sorted(state_dict)}, this optimizer has {sorted(self.optimizers)}.")
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state_dict[name])


def build_multi_optimizer(model: nn.Module, build: Callable[[Iterable[nn.Parameter]], Optimizer]) -> MultiOptimizer:
    """One optimizer for the dense parameters and one for the experts.

    Args:
        build: makes an optimizer of parameters of one mesh.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    split = {
        "dense": [p for p in trainable if not is_expert_parameter(p)],
        "experts": [p for p in trainable if is_expert_parameter(p)],
    }
    return MultiOptimizer({name: build(params) for name, params in split.items() if params})


class _ChainedState(MutableMapping):
    """Per-parameter state of several optimizers as one mapping; each entry lives with the parameter's optimizer."""

    def __init__(self, optimizers: Iterable[Optimizer]):
        self._states = [o.state for o in optimizers]
        self._owner = {p: o.state for o in optimizers for group in o.param_groups for p in group["params"]}

    def __getitem__(self, param: Any) -> Any:
        return self._owner[param][param]

    def __setitem__(self, param: Any, value: Any) -> None:
        self._owner[param][param] = value

    def __delitem__(self, param: Any) -> None:
        del self._owner[param][param]

    def __iter__(self) -> Iterator[Any]:
        for state in self._states:
            yield from state

    def __len__(self) -> int:
        return sum(len(state) for state in self._states)
