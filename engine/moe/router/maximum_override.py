"""Override the maxima by which Phi-3.5-MoE's router chooses experts (``sparsemixer``), one after the other.

It takes the largest score, then the largest of what is left, and in training the largest of scores with noise. Of each
choice it computes a softmax over the scores that are close to the largest one; the others are masked.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["MaximumRouting", "chooses_by_maximum"]

_CHOICES = 2  # what ``sparsemixer`` asserts of ``top_k``


def chooses_by_maximum(block: Any) -> bool:
    """Tell whether the code of a block's class has this router."""
    return any(hasattr(sys.modules.get(kind.__module__), "sparsemixer") for kind in type(block).__mro__)


class MaximumRouting(TorchFunctionMode):
    """While it is active, the first two choices of a router are the wanted ones, and none of them is masked.

    Args:
        wanted: ``[tokens, 2]``.
        is_route: ``[tokens]``; elsewhere the router chooses.
        num_experts: of the layer.
        training: whether the block is in training mode.
        told: is called when both are chosen, with what the router would choose (in training, most likely).
    """

    def __init__(
        self,
        wanted: torch.Tensor,
        is_route: torch.Tensor,
        num_experts: int,
        training: bool,
        told: Callable[[torch.Tensor], None],
    ):
        super().__init__()
        self._wanted, self._is_route = wanted, is_route
        self._shape, self._training, self._told = (wanted.shape[0], num_experts), training, told
        self._chosen = self._masked = 0
        self._native: torch.Tensor | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in (torch.Tensor.max, torch.Tensor.masked_fill) or tuple(args[0].shape) != self._shape:
            return func(*args, **kwargs)
        if func is torch.Tensor.masked_fill:
            if self._masked == _CHOICES:
                return func(*args, **kwargs)
            ids, self._masked = self._wanted[:, self._masked, None].long(), self._masked + 1
            unmasked = torch.zeros_like(args[1]).scatter(1, ids, self._is_route[:, None])
            return func(args[0], args[1] & ~unmasked, *args[2:], **kwargs)
        if self._native is None:
            self._native = args[0].detach().topk(_CHOICES).indices
        found = func(*args, **kwargs)
        # In training the maximum that keeps its dim is of the scores without noise.
        if self._chosen == _CHOICES or kwargs.get("keepdim", False) == self._training:
            return found
        ids, self._chosen = self._wanted[:, self._chosen], self._chosen + 1
        if self._chosen == _CHOICES:
            self._told(self._native)
        own = found.indices.view(-1)
        ids = torch.where(self._is_route, ids.to(own.dtype), own).view_as(found.indices)
        return torch.return_types.max((found.values, ids))
