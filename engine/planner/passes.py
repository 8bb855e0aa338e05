"""Count the bytes that a layer's operators read and write, by running its forward and backward on the meta device.

Eager operators and fused kernels are bound by memory, so these bytes give their time. Matrix products are left out, and
so are attention and experts, for which the planner has functions of its own (``activations.py``).
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CountedPasses", "backward_of"]

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_MOVE_NOTHING = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view")


class CountedPasses(TorchDispatchMode):
    """Sums the bytes that operators read and write in ``nbytes``; an expanded tensor counts its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in _PRODUCTS + _MOVE_NOTHING:
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.nbytes += sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)
        return out


def backward_of(outputs: Any, inputs: list[torch.Tensor]) -> None:
    """Run the backward of a layer on meta, from gradients of all outputs to gradients of inputs and weights."""
    reached = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in inputs if t.requires_grad]
    if reached and leaves:
        torch.autograd.grad(reached, leaves, [torch.empty_like(t) for t in reached], allow_unused=True)
