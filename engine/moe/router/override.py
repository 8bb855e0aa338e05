"""Override the choice of experts by a router: its ``topk``, or in Phi-3.5-MoE the maxima of ``sparsemixer``.

Both are ``TorchFunctionMode``s. A mode is thread-local, and backward may run in another thread, so it has to be entered
inside the recomputed function.
"""

import abc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["MaximumRouting", "RoutingMode", "chooses_by_maximum"]

_TOPK = (torch.topk, torch.Tensor.topk)
_CHOICES = 2  # ``sparsemixer`` asserts this ``top_k``


class RoutingMode(TorchFunctionMode, abc.ABC):
    """While it is active, each ``topk`` over at most ``num_experts`` scores returns the ids from ``choose``."""

    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = num_experts

    @abc.abstractmethod
    def choose(self, scores: torch.Tensor, dim: int, native: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Return distinct ids along ``dim``, or None to leave ``topk`` unchanged; ``native()`` returns its ids."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores, dim = _scores(*args, **kwargs)
        if scores.shape[dim] > self.num_experts or "out" in kwargs:
            return func(*args, **kwargs)

        def native() -> torch.Tensor:
            with torch.no_grad():
                return func(*args, **kwargs).indices

        ids = self.choose(scores, dim, native)
        if ids is None:
            return func(*args, **kwargs)
        return torch.return_types.topk((_TakeAlong.apply(scores, ids, dim), ids))


def _scores(input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, out: Any = None):
    """Return the scores and the dim of a ``topk`` call; has the signature of ``topk``."""
    return input, dim


class _TakeAlong(torch.autograd.Function):
    """``gather`` of distinct ids; its gradient is a scatter without addition, so it is deterministic."""

    @staticmethod
    def forward(ctx, scores, ids, dim):
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dim = scores.shape, dim
        return scores.gather(dim, ids)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter(ctx.dim, ids, grad), None, None


def chooses_by_maximum(block: Any) -> bool:
    """Whether the module of a block's class has ``sparsemixer``."""
    return any(hasattr(sys.modules.get(kind.__module__), "sparsemixer") for kind in type(block).__mro__)


class MaximumRouting(TorchFunctionMode):
    """While it is active, the router's two choices are the wanted ones, and neither is masked.

    ``sparsemixer`` takes the largest score, then the largest of the rest; in training it adds noise to the scores. The
    weight of a choice is a softmax over the scores close to the largest one; ``sparsemixer`` masks the others.

    Args:
        wanted: ``[tokens, 2]``.
        is_route: ``[tokens]``; elsewhere the router chooses.
        report: called after both choices, with the router's own (in training, its most likely ones).
    """

    def __init__(
        self, wanted: torch.Tensor, is_route: torch.Tensor, experts: int, training: bool, report: Callable[..., None]
    ):
        super().__init__()
        self._wanted, self._is_route = wanted, is_route
        self._shape, self._training, self._report = (wanted.shape[0], experts), training, report
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
        # In training the maximum that keeps its dim is the one of the scores without noise.
        if self._chosen == _CHOICES or kwargs.get("keepdim", False) == self._training:
            return found
        ids, self._chosen = self._wanted[:, self._chosen], self._chosen + 1
        if self._chosen == _CHOICES:
            self._report(self._native)
        own = found.indices.view(-1)
        ids = torch.where(self._is_route, ids.to(own.dtype), own).view_as(found.indices)
        return torch.return_types.max((found.values, ids))
