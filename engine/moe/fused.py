"""The experts' computation as autograd functions that save only their input and the pre-activation.

Backward recomputes the activation, by the module's own code where the backend has no operator for it. It also gathers
the rows again, unless the GEMMs read them through an index. The output that a routing weight ``w`` scales is not saved
for the gradient of ``w`` either, because with ``out = act @ W``

    <grad, out> = <grad @ W.T, act>

and ``grad @ W.T`` is needed anyway (SonicMoE, arXiv:2512.14080, section 3). A (token, expert) pair keeps ``2 * I``
elements on a single rank, and ``D + 2 * I`` as a received row; autograd would save ``2 * D + 4 * I``. Routing weights
are applied on the source rank after combine, and sent with the rows (``overlap.py``).

``on_tokens`` is dispatch, experts and combine in one. It is two autograd nodes. ``_Up`` saves the tensors of both, and
``_Down`` none. Checkpointing stops a recomputation once all saved tensors are there, so before the down projection.
``on_rows`` is the experts alone, for the rows of ``overlap.exchange`` and ``deepep.exchange``.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .collectives.rows import RowExchange
from .dispatch import DispatchPlan, slot_weights
from .gemm.backends import Backend, Groups, IndexedRows, Rows, inverse
from .gemm.gate import gate_of
from .gemm.linear import Linear

__all__ = ["Experts", "on_rows", "on_tokens"]


@dataclass(frozen=True)
class Experts:
    """An experts module's two linears and the backend that computes them."""

    module: Any
    backend: Backend
    up: Linear
    down: Linear

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.up.tensors + self.down.tensors

    def holding(self, tensors: Sequence[torch.Tensor | None]) -> "Experts":
        return replace(self, up=self.up.holding(tensors[:4]), down=self.down.holding(tensors[4:]))

    def activation(self, pre: torch.Tensor) -> torch.Tensor:
        rows, pre = len(pre), self.backend.aligned(pre)
        act = self.module._apply_gate(pre) if self.module.has_gate else self.module.act_fn(pre)
        # Under autocast the activation may return another dtype than it got.
        return act[:rows].to(self.down.weight.dtype)

    def forward_up(self, rows: Rows, groups: Groups) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the pre-activation, and the activation where the backend fuses it (else ``None``)."""
        gate = gate_of(self.module)
        if gate is not None and self.up.lora_A is None:
            return self.backend.up_gate(rows, self.up.in_out, groups, self.up.bias, gate)
        return self.up.forward(self.backend, rows, groups), None

    def forward_down(
        self,
        pre: torch.Tensor,
        act: torch.Tensor | None,
        groups: Groups,
        ambient: Any,
        order_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the output, by ``order_R`` as in ``Backend.mm``; ``act=None`` computes the activation first."""
        if act is None:
            gate = gate_of(self.module)
            with ambient:
                act = self.activation(pre) if gate is None else self.backend.activate(pre, gate)
        return self.down.forward(self.backend, act, groups, order_R)

    def backward(
        self,
        pre: torch.Tensor,
        grad: Rows,
        groups: Groups,
        ambient: Any,
        scale_R: torch.Tensor | None,
        needed: Sequence[bool],
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor | None]]:
        """Compute the gradients of ``pre``, of ``scale_R`` and of ``down``'s tensors.

        Args:
            grad: the gradient of the output, or with ``scale_R`` the gradient of the output times ``scale_R``.
        """
        gate = gate_of(self.module)
        if gate is not None and self.down.lora_A is None:
            out_in = self.down.in_out.mT
            grad_pre, act, grad_scale = self.backend.mm_gate_backward(grad, out_in, groups, pre, scale_R, gate)
        elif gate is not None:
            grad_act = self.down.grad_rows(self.backend, grad, groups)
            grad_pre, act, grad_scale = self.backend.activate_backward(pre, grad_act, scale_R, gate)
        else:
            grad_act = self.down.grad_rows(self.backend, grad, groups)
            with torch.enable_grad(), ambient:
                leaf = pre.detach().requires_grad_()
                act = self.activation(leaf)
            grad_scale = None
            if scale_R is not None:
                grad_scale = (grad_act.to(torch.promote_types(grad_act.dtype, torch.float32)) * act.detach()).sum(-1)
                grad_act.mul_(scale_R.unsqueeze(-1))
            (grad_pre,) = torch.autograd.grad(act, leaf, grad_act)
            act = act.detach()
            if scale_R is not None:
                act = (act * scale_R.unsqueeze(-1)).to(act.dtype)
        if grad_scale is not None and self.down.bias is not None:
            grad_scale += self.backend.row_dot(grad, self.down.bias, groups)
        grads = self.down.grad_tensors(self.backend, act, grad, groups, needed, scale_R)
        return grad_pre, grad_scale, grads


def on_rows(
    experts: Experts,
    rows_RD: torch.Tensor,
    counts_e: torch.Tensor,
    scale_R: torch.Tensor | None = None,
    order_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the local experts on rows grouped by expert, ``(R, D)``; saves the rows and the pre-activation.

    Args:
        scale_R: routing weights that the source rank applies: backward expects the gradient of the weighted output
            (``dispatch.deferred_router_grad``). ``None``: backward gets the output's own gradient.
        order_R: the permutation that groups the rows, ``rows_RD[order_R]``. Weights and output have the order of
            ``rows_RD``.
    """
    return _OnRows.apply(experts, Groups(counts_e, rows_RD.shape[0]), rows_RD, scale_R, order_R, *experts.tensors)


def on_tokens(
    experts: Experts,
    hidden_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    plan: DispatchPlan,
    dtype: torch.dtype,
    to_send: list[torch.Tensor],
) -> torch.Tensor:
    """Dispatch this rank's tokens, compute the local experts, and combine; returns ``(T, D)`` in ``dtype``.

    Args:
        hidden_TD: in the dtype of the experts' parameters; the routing weights have any float dtype.
        to_send: the slots' hidden states ``(T * K, D)``, popped when they are sent; empty without a group.
    """
    # The next node's input, popped so that it is freed early: the rows to send, then _Up's ctx and the activation.
    between: list[Any] = to_send
    call = _Call(
        experts.holding([None] * 8),
        Groups(plan.counts_e, plan.rows),
        plan.all_to_all,
        weights_TK.shape[1],
        dtype,
        _ambient(hidden_TD),
        torch.is_grad_enabled(),
    )
    orders = plan.slot_order, plan.row_order
    pre = _Up.apply(call, between, *orders, hidden_TD, weights_TK, *experts.tensors)
    return _Down.apply(call, between, *orders, pre, weights_TK.detach(), *experts.down.tensors)


@dataclass(frozen=True)
class _Call:
    """The arguments of both nodes of ``on_tokens``; no tensor of the tokens' size, because it lives until backward."""

    experts: Experts
    groups: Groups
    all_to_all: RowExchange
    k: int
    dtype: torch.dtype
    ambient: Any
    trains: bool

    @property
    def backend(self) -> Backend:
        return self.experts.backend

    def to_experts(self, x_TD: torch.Tensor, slot_order: torch.Tensor, row_order: torch.Tensor | None) -> Rows:
        """Send a tensor of tokens to the ranks of their experts, as rows in expert order: ``(T, D)`` to ``(R, D)``."""
        tokens_S = slot_order // self.k
        if row_order is None:
            return self.backend.indexed(x_TD, tokens_S)
        return self.backend.indexed(self.all_to_all(self.backend.take(x_TD, tokens_S)), row_order)

    def slots(self, slot_order: torch.Tensor) -> torch.Tensor:
        """Return the position of each slot of a token, ``(T, K)``."""
        return inverse(slot_order).view(-1, self.k)

    def summed(self, x_RD: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
        """Return received rows to the ranks of their tokens, and sum each token's: ``(R, D)`` to ``(T, D)``."""
        x_SD = self.all_to_all.reversed()(x_RD)
        dtype = x_SD.dtype if weights_TK is None else self.dtype
        return self.backend.gather_sum(x_SD, slots_TK, weights_TK, dtype)


class _OnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, experts, groups, rows_RD, scale_R, order_R, *tensors):
        ctx.experts, ctx.groups, ctx.ambient = experts.holding([None] * 8), groups, _ambient(rows_RD)
        with _no_autocast(rows_RD):
            rows = rows_RD if order_R is None else experts.backend.indexed(rows_RD, order_R)
            pre, act = experts.forward_up(rows, groups)
            out = experts.forward_down(pre, act, groups, ctx.ambient, order_R)
        trains_up = any(ctx.needs_input_grad[5:9])
        ctx.save_for_backward(pre, rows_RD if trains_up else None, scale_R, order_R, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD):
        pre, rows_RD, scale_R, order_R, *tensors = ctx.saved_tensors
        experts, groups, needed = ctx.experts.holding(tensors), ctx.groups, ctx.needs_input_grad[5:]
        backend, up, dtype = experts.backend, experts.up, None if scale_R is None else scale_R.dtype
        with _no_autocast(grad_RD):
            grad_RD = grad_RD.to(pre.dtype).contiguous()
            if order_R is not None:
                grad_RD = backend.indexed(grad_RD, order_R)
                rows_RD = None if rows_RD is None else backend.indexed(rows_RD, order_R)
                scale_R = None if scale_R is None else scale_R[order_R]
            grad_pre, grad_scale, down_grads = experts.backward(pre, grad_RD, groups, ctx.ambient, scale_R, needed[4:])
            del grad_RD
            up_grads = up.grad_tensors(backend, rows_RD, grad_pre, groups, needed[:4])
            grad_rows = up.grad_rows(backend, grad_pre, groups, order_R) if ctx.needs_input_grad[2] else None
            if scale_R is not None:
                grad_scale = _scattered(grad_scale, order_R).to(dtype)
        return None, None, grad_rows, grad_scale, None, *up_grads, *down_grads


class _Up(torch.autograd.Function):
    """Dispatch and first linear. It also saves the tensors of ``_Down``, whose backward runs first and reads them."""

    @staticmethod
    def forward(ctx, call, between, slot_order, row_order, hidden_TD, weights_TK, *tensors):
        ctx.call, ctx.weights_dtype = call, weights_TK.dtype
        with _no_autocast(hidden_TD):
            if row_order is None:
                rows_RD = call.to_experts(hidden_TD, slot_order, row_order)
            else:
                rows_RD = call.backend.indexed(call.all_to_all(between.pop()), row_order)
            pre, act = call.experts.holding(tensors).forward_up(rows_RD, call.groups)
        if call.trains:
            if row_order is None:
                inputs, scale = hidden_TD, weights_TK
            else:
                inputs = rows_RD.x if isinstance(rows_RD, IndexedRows) else rows_RD
                scale = call.all_to_all(slot_weights(weights_TK)[slot_order])[row_order]
            ctx.in_order = inputs is rows_RD
            trains_up = any(ctx.needs_input_grad[6:10])
            ctx.save_for_backward(pre, slot_order, row_order, scale, inputs if trains_up else None, *tensors)
        between.append((ctx, act))
        return pre

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_pre):
        # _Down's backward runs first in any backward through the layer's output, also with retain_graph=True.
        assert ctx.from_down is not None, (
            "the backward of the experts' first linear ran before that of their second, whose results it needs: "
            "differentiate through the layer's output"
        )
        (slot_order, row_order, inputs, tensors, grad_scale), ctx.from_down = ctx.from_down, None
        call, needed = ctx.call, ctx.needs_input_grad[6:]
        experts = call.experts.holding(tensors)
        up, up_grads, grad_hidden, grad_weights = experts.up, [None] * 4, None, None
        slots_TK = call.slots(slot_order)
        with _no_autocast(grad_pre):
            if inputs is not None:
                index_R = slot_order // call.k if row_order is None else row_order
                rows_RD = inputs if ctx.in_order else call.backend.indexed(inputs, index_R)
                up_grads = up.grad_tensors(call.backend, rows_RD, grad_pre, call.groups, needed[:4])
                del rows_RD, inputs
            if ctx.needs_input_grad[4]:
                grad_rows = up.grad_rows(call.backend, grad_pre, call.groups, row_order)
                grad_hidden = call.summed(grad_rows, slots_TK, None)
            if ctx.needs_input_grad[5]:
                grad_scale = call.all_to_all.reversed()(_scattered(grad_scale, row_order))
                grad_weights = grad_scale[slots_TK].to(ctx.weights_dtype)
        return None, None, None, None, grad_hidden, grad_weights, *up_grads, *([None] * 4)


class _Down(torch.autograd.Function):
    """Activation, second linear and combine. It saves nothing: its backward reads the tensors that ``_Up`` saved."""

    @staticmethod
    def forward(ctx, call, between, slot_order, row_order, pre, weights_TK, *tensors):
        (ctx.up, act), ctx.call = between.pop(), call
        experts = call.experts.holding([None] * 4 + list(tensors))
        with _no_autocast(pre):
            out_RD = experts.forward_down(pre, act, call.groups, call.ambient, row_order)
            del act
            return call.summed(out_RD, call.slots(slot_order), weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        call, needed = ctx.call, ctx.needs_input_grad[6:]
        pre, slot_order, row_order, scale, inputs, *tensors = ctx.up.saved_tensors
        with _no_autocast(grad_TD):
            grad_RD = call.to_experts(grad_TD.to(pre.dtype).contiguous(), slot_order, row_order)
            scale_R = scale if row_order is not None else scale.reshape(-1)[slot_order]
            experts = call.experts.holding(tensors)
            grad_pre, grad_scale, down_grads = experts.backward(
                pre, grad_RD, call.groups, call.ambient, scale_R, needed
            )
        ctx.up.from_down = slot_order, row_order, inputs, tensors, grad_scale
        return None, None, None, None, grad_pre, None, *down_grads


def _scattered(x_R: torch.Tensor, order_R: torch.Tensor | None) -> torch.Tensor:
    """Return the vector ``y`` with ``y[order_R[i]] = x_R[i]``."""
    return x_R if order_R is None else torch.empty_like(x_R).index_copy_(0, order_R, x_R)


def _no_autocast(like: torch.Tensor) -> Any:
    device = like.device.type
    is_there = torch.amp.is_autocast_available(device)  # not on meta
    return torch.autocast(device, enabled=False) if is_there else contextlib.nullcontext()


def _ambient(like: torch.Tensor) -> Any:
    """Return the current autocast context, in which the activation runs in forward and in backward."""
    device = like.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False)
