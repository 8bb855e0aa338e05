"""Count the memory of the experts' backward on the meta device: the real functions run with one expert's GEMMs.

``activations.py`` counts what a forward saves; experts that save little recompute more in backward. The collectives of
dispatch are left out.
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
    """A part of the experts' backward, up to the next gradient of a weight.

    Attributes:
        share: the share of the weights' gradients that exists by then.
        nbytes: the most bytes per token of everything else.
    """

    share: float
    nbytes: float


def backward_phases(
    module: Any, hidden_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, all_here: bool
) -> list[BackwardPhase]:
    """Split the experts' backward into phases, which end at each gradient of a weight, and measure each.

    Args:
        module: an experts module on meta; its weights are not counted.
        all_here: whether all experts are on one rank, so that nothing is dispatched.
    """
    weight = dict(module.named_parameters(recurse=False))
    up, down = linears(module, weight)
    hidden = hidden_TD.detach().to(down.weight.dtype).requires_grad_()
    scores = weights_TK.detach().requires_grad_()
    live = _Live([hidden, scores, experts_TK, *weight.values()])
    backend = SingleExpertBackend(live.end_phase)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(live.see, lambda tensor: tensor):
        plan = local_dispatch_plan(experts_TK, down.weight.shape[0], all_here)
        out = on_tokens(module, backend, up, down, hidden, scores, plan, hidden_TD.dtype)
        del plan
        trained = [tensor for tensor in (hidden, scores, *weight.values()) if tensor.requires_grad]
        grad = torch.empty_like(out)
        with live:
            torch.autograd.grad(out, trained, grad, allow_unused=True)
    live.end_phase(0)
    sizes = [size for size, _ in live.phases]
    total, tokens = max(sum(sizes), 1), len(hidden)
    return [BackwardPhase(sum(sizes[:i]) / total, most / tokens) for i, (_, most) in enumerate(live.phases)]


def local_dispatch_plan(experts_TK: torch.Tensor, num_experts: int, all_here: bool) -> DispatchPlan:
    """Build a plan without collectives; with ``all_here=False`` tensors are saved as if rows were received."""
    (plan,) = build_dispatch_plans(experts_TK, num_experts, None)
    return plan if all_here else replace(plan, row_order=plan.slot_order.clone())


class _Live(TorchDispatchMode):
    """Tracks live storages, and the most bytes of them since the last gradient of a weight."""

    def __init__(self, ignored: Iterable[torch.Tensor]):
        super().__init__()
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = 0
        self.phases: list[tuple[int, int]] = []  # elements of the gradient that ends the phase, most bytes

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ignored:
            self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return tensor

    def end_phase(self, elements: int) -> None:
        """End a phase, at a gradient of so many elements."""
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
    """Computes all rows with one expert's weights.

    Args:
        made: called with the number of elements of each weight's gradient.
    """

    def __init__(self, made: Callable[[int], None] = lambda elements: None):
        self._made = made

    def mm(self, rows: torch.Tensor, in_out: torch.Tensor, groups: Groups, bias: torch.Tensor | None = None) -> Any:
        return rows @ in_out[0] if bias is None else torch.addmm(bias[0], rows, in_out[0])

    def outer(self, a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
        shape = (groups.counts_e.shape[0], a.shape[1], b.shape[1])
        self._made(shape[0] * shape[1] * shape[2])
        return a.new_empty(1).expand(shape)
