"""Override the ``topk`` by which a router chooses experts; every family on the experts interface calls it."""

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["RoutingMode"]

_TOPK = (torch.topk, torch.Tensor.topk)


class RoutingMode(TorchFunctionMode, abc.ABC):
    """While it is active, each routing ``topk`` returns what ``choose`` does.

    It is thread-local, and backward may run in another thread, so it has to be entered inside the recomputed function.

    Args:
        num_experts: the largest number of experts; a ``topk`` over more scores is not routing.
    """

    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = num_experts

    @abc.abstractmethod
    def choose(self, scores: torch.Tensor, dim: int, native: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Return distinct ids along ``dim``, or None to leave ``topk`` unchanged.

        Args:
            native: returns the ids that ``topk`` would choose.
        """

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
