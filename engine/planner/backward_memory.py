"""What the experts' backward holds at once, counted on the meta device: the real functions, with one expert's GEMMs.

What a forward leaves is counted by ``activations.py``; for experts that keep little, backward computes more again.
Of rows that are sent all is done but the sending.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..moe.dispatch import DispatchPlan, build_dispatch_plans
from ..moe.forward import linears
from ..moe.fused import on_tokens
from ..moe.gemm.backends import Groups, TorchBackend

__all__ = ["SingleExpertBackend", "BackwardPhase", "backward_phases", "local_dispatch_plan"]


class BackwardPhase(NamedTuple):
    """Of a backward, up to the next gradient of a weight.

    Attributes:
        share: the part of the weights' gradients that is there.
        nbytes: the most bytes per token of all else that is.
    """

    share: float
    nbytes: float


def backward_phases(
    module: Any, hidden_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, all_here: bool
) -> list[BackwardPhase]:
    """A backward from where it begins to the first gradient of a weight, from there to the second, and so on.

    Args:
        module: an experts module on meta; its weights are not counted.
        all_here: all experts are on one rank, and nothing is dispatched.
    """
    weight = dict(module.named_parameters(recurse=False))
    up, down = linears(module, weight)
    hidden = hidden_TD.detach().to(down.weight.dtype).requires_grad_()
    scores = weights_TK.detach().requires_grad_()
    live = _Live([hidden, scores, experts_TK, *weight.values()])
    backend = SingleExpertBackend(live.next)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(live.see, lambda tensor: tensor):
        route = local_dispatch_plan(experts_TK, down.weight.shape[0], all_here)
        out = on_tokens(module, backend, up, down, hidden, scores, route, hidden_TD.dtype)
        del route
        trained = [tensor for tensor in (hidden, scores, *weight.values()) if tensor.requires_grad]
        grad = torch.empty_like(out)
        with live:
            torch.autograd.grad(out, trained, grad, allow_unused=True)
    live.next(0)
    sizes = [size for size, _ in live.phases]
    total, tokens = max(sum(sizes), 1), len(hidden)
    return [BackwardPhase(sum(sizes[:i]) / total, most / tokens) for i, (_, most) in enumerate(live.phases)]


def local_dispatch_plan(experts_TK: torch.Tensor, num_experts: int, all_here: bool) -> DispatchPlan:
    """A route that never leaves; with ``all_here`` false all is kept and held as if it did."""
    (route,) = build_dispatch_plans(experts_TK, num_experts, None)
    return route if all_here else replace(route, row_order=route.slot_order.clone())


class _Live(TorchDispatchMode):
    """Storages that are alive, and the most bytes of them since the last gradient of a weight."""

    def __init__(self, passed_over: Iterable[torch.Tensor]):
        super().__init__()
        self._passed_over = {tensor.untyped_storage()._cdata for tensor in passed_over}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = 0
        self.phases: list[tuple[int, int]] = []  # elements of the gradient that ends it, most bytes

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._passed_over:
            self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return tensor

    def next(self, elements: int) -> None:
        """A gradient of so many elements is made."""
        self.phases.append((elements, self._most))
        self._most = 0
        self._look()

    def _look(self) -> None:
        self._storages = {key: found for key, found in self._storages.items() if not found[0].expired()}
        self._most = max(self._most, sum(nbytes for _, nbytes in self._storages.values()))

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        self._look()
        return out


class SingleExpertBackend(TorchBackend):
    """One expert's GEMMs for all rows.

    Args:
        made: called with the elements of each weight's gradient.
    """

    def __init__(self, made: Callable[[int], None] = lambda elements: None):
        self._made = made

    def mm(self, rows: torch.Tensor, in_out: torch.Tensor, groups: Groups, bias: torch.Tensor | None = None) -> Any:
        return rows @ in_out[0] if bias is None else torch.addmm(bias[0], rows, in_out[0])

    def outer(self, a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
        shape = (groups.counts_e.shape[0], a.shape[1], b.shape[1])
        self._made(shape[0] * shape[1] * shape[2])
        return a.new_empty(1).expand(shape)
