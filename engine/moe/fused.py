"""The whole experts' computation as autograd functions that keep their input and the pre-activation and no more.

Everything else is computed again in backward: the activation, by the module's own code, and the gathered rows, by
gathering them again. What a routing weight ``w`` scales is never kept for its gradient: with ``out = act @ W``

    <grad, out> = <grad @ W.T, act>

and ``grad @ W.T`` is needed anyway (SonicMoE, arXiv:2512.14080, section 3). So the memory per (token, expert) pair is
``2 * I`` elements on a single rank, and ``D + 2 * I`` of a row that was sent here, where autograd would keep
``2 * D + 4 * I``. Rows are scaled at home, as in ``dispatch.combine``; for their gradient the weights travel with them,
the gradient of the sum travels to the experts as it is, and the weights' gradient home with that of the rows.

``on_tokens`` is dispatch, experts and combine in one. The first of its halves, ``_Up`` and ``_Down``, keeps what both
need: a layer that is computed again for its backward (checkpointing) is done when it has all that was kept, before the
down projection and the way home. ``on_rows`` is the experts alone, for rows that others bring.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .dispatch import AllToAll, DispatchPlan, inverse, slot_weights
from .gemm.backends import Backend, Groups

__all__ = ["Linear", "on_rows", "on_tokens"]

_COLUMNS = 8  # of a GEMM operand that stands for a vector: as many as make rows of 16 bytes in every dtype


@dataclass(frozen=True)
class Linear:
    """One of the experts' linears, with its bias and its low-rank adapter if it has them.

    Args:
        weight: ``(e, out, in)``, or ``(e, in, out)`` where ``is_transposed``.
        bias: ``(e, out)``.
        lora_A: ``(e, r, in)``.
        lora_B: ``(e, out, r)``.
        scaling: of the adapter.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    lora_A: torch.Tensor | None
    lora_B: torch.Tensor | None
    scaling: float
    is_transposed: bool

    @classmethod
    def of(cls, name: str, weight: Mapping[str, torch.Tensor], is_transposed: bool, scaling: float | None) -> "Linear":
        """Of an experts module's parameters; ``scaling`` is ``None`` where adapters, if it has any, don't take part."""
        if scaling is None:
            return cls(weight[name], weight.get(f"{name}_bias"), None, None, 0.0, is_transposed)
        a, b = (weight.get(f"{name}_lora_{half}") for half in "AB")
        return cls(weight[name], weight.get(f"{name}_bias"), a, b, scaling, is_transposed)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self.weight, self.bias, self.lora_A, self.lora_B)

    def holding(self, tensors: Sequence[torch.Tensor | None]) -> "Linear":
        """The same linear of other tensors, in the order of ``tensors``."""
        return replace(self, **dict(zip(("weight", "bias", "lora_A", "lora_B"), tensors, strict=True)))  # type: ignore[arg-type]

    @property
    def in_out(self) -> torch.Tensor:
        return self.weight if self.is_transposed else self.weight.mT

    def forward(self, backend: Backend, rows: torch.Tensor, groups: Groups) -> torch.Tensor:
        out = backend.mm(rows, self.in_out, groups, self.bias)
        if self.lora_A is not None and self.lora_B is not None:
            low = backend.mm(rows, self.lora_A.mT, groups)
            out.add_(backend.mm(low, self.lora_B.mT, groups), alpha=self.scaling)
        return out

    def grad_rows(self, backend: Backend, grad: torch.Tensor, groups: Groups) -> torch.Tensor:
        grad_rows = backend.mm(grad, self.in_out.mT, groups)
        if self.lora_A is not None and self.lora_B is not None:
            low = backend.mm(grad, self.lora_B, groups)
            grad_rows.add_(backend.mm(low, self.lora_A, groups), alpha=self.scaling)
        return grad_rows

    def grad_tensors(
        self,
        backend: Backend,
        rows: torch.Tensor,
        grad: torch.Tensor,
        groups: Groups,
        needed: Sequence[bool],
        scale_R: torch.Tensor | None = None,
    ) -> list[torch.Tensor | None]:
        """Of ``tensors``, dense: zero for experts without rows, not ``None``, which FSDP would skip on this rank only.

        Args:
            rows: that went in, times ``scale_R``.
            scale_R: by what the output was scaled.
        """
        grads: list[torch.Tensor | None] = [None] * 4
        if needed[0]:
            grads[0] = backend.outer(rows, grad, groups) if self.is_transposed else backend.outer(grad, rows, groups)
        if needed[1]:
            ones = grad.new_ones(groups.rows) if scale_R is None else scale_R.to(grad.dtype)
            grads[1] = backend.outer(_columns(ones), grad, groups)[:, 0]
        if self.lora_A is not None and self.lora_B is not None:
            if needed[2]:
                grads[2] = backend.outer(backend.mm(grad, self.lora_B, groups).mul_(self.scaling), rows, groups)
            if needed[3]:
                grads[3] = backend.outer(grad, backend.mm(rows, self.lora_A.mT, groups).mul_(self.scaling), groups)
        return grads


@dataclass(frozen=True)
class _Experts:
    """What is computed, and by what; its tensors are those of ``up`` and ``down``."""

    module: Any
    backend: Backend
    up: Linear
    down: Linear

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.up.tensors + self.down.tensors

    def holding(self, tensors: Sequence[torch.Tensor | None]) -> "_Experts":
        return replace(self, up=self.up.holding(tensors[:4]), down=self.down.holding(tensors[4:]))

    def activation(self, pre: torch.Tensor) -> torch.Tensor:
        act = self.module._apply_gate(pre) if self.module.has_gate else self.module.act_fn(pre)
        # Under autocast it may come back in another dtype than it was given.
        return act.to(self.down.weight.dtype)

    def forward_up(self, rows: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The pre-activation, and the activation if it comes with it."""
        gate = self.backend.gate(self.module, self.down.weight.dtype) if self.up.lora_A is None else None
        if gate is not None:
            return self.backend.up_gate(rows, self.up.in_out, groups, self.up.bias, gate)
        return self.up.forward(self.backend, rows, groups), None

    def forward_down(self, pre: torch.Tensor, act: torch.Tensor | None, groups: Groups, ambient: Any) -> torch.Tensor:
        """The output; ``act`` is computed where it is not there."""
        if act is None:
            with ambient:
                act = self.activation(pre)
        return self.down.forward(self.backend, act, groups)

    def backward(
        self,
        pre: torch.Tensor,
        grad: torch.Tensor,
        groups: Groups,
        ambient: Any,
        scale_R: torch.Tensor | None,
        needed: Sequence[bool],
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor | None]]:
        """From the gradient of the output, or of the output times ``scale_R``, those of ``pre``, scale and ``down``."""
        gate = self.backend.gate(self.module, self.down.weight.dtype) if self.down.lora_A is None else None
        if gate is not None:
            out_in = self.down.in_out.mT
            grad_pre, act, grad_scale = self.backend.down_gate_backward(grad, out_in, groups, pre, scale_R, gate)
        else:
            with torch.enable_grad(), ambient:
                leaf = pre.detach().requires_grad_()
                act = self.activation(leaf)
            grad_act, grad_scale = self.down.grad_rows(self.backend, grad, groups), None
            if scale_R is not None:
                grad_scale = (grad_act.to(torch.promote_types(grad_act.dtype, torch.float32)) * act.detach()).sum(-1)
                grad_act.mul_(scale_R.unsqueeze(-1))
            (grad_pre,) = torch.autograd.grad(act, leaf, grad_act)
            act = act.detach()
            if scale_R is not None:
                act = (act * scale_R.unsqueeze(-1)).to(act.dtype)
        if grad_scale is not None and self.down.bias is not None:
            grad_scale += self.backend.mm(grad, _columns(self.down.bias), groups)[:, 0]
        grads = self.down.grad_tensors(self.backend, act, grad, groups, needed, scale_R)
        return grad_pre, grad_scale, grads


def on_rows(
    module: Any,
    backend: Backend,
    up: Linear,
    down: Linear,
    rows_RD: torch.Tensor,
    counts_e: torch.Tensor,
    scale_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the local experts make of rows grouped by expert, ``(R, D)``; keeps these and the pre-activation.

    Args:
        scale_R: routing weights, applied elsewhere: the gradient that comes back is of the output times these, as
            ``dispatch.deferred_router_grad`` has it. ``None``: it is the output's.
    """
    experts = _Experts(module, backend, up, down)
    return _OnRows.apply(experts, Groups(counts_e, rows_RD.shape[0]), rows_RD, scale_R, *experts.tensors)


def on_tokens(
    module: Any,
    backend: Backend,
    up: Linear,
    down: Linear,
    hidden_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    route: DispatchPlan,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What experts, wherever they are, make of this rank's tokens: ``(T, D)`` in ``dtype``, summed with their weights.

    Args:
        up, down: of the experts on this rank.
        hidden_TD: in the dtype of the weights.
        weights_TK: any float dtype.
        route: of the tokens (``dispatch.build_dispatch_plans``).
    """
    experts = _Experts(module, backend, up, down)
    handed: list[tuple[Any, torch.Tensor | None]] = []  # from one half to the other
    call = _Call(
        experts.holding([None] * 8),
        Groups(route.counts_e, route.rows),
        route.travel,
        weights_TK.shape[1],
        dtype,
        _ambient(hidden_TD),
        torch.is_grad_enabled(),
    )
    orders = route.slot_order, route.row_order
    pre = _Up.apply(call, handed, *orders, hidden_TD, weights_TK, *experts.tensors)
    return _Down.apply(call, handed, *orders, pre, weights_TK.detach(), *down.tensors)


@dataclass(frozen=True)
class _Call:
    """What both halves of ``on_tokens`` know; no tensor of the size of the tokens, as it lives until the backward."""

    experts: _Experts
    groups: Groups
    travel: AllToAll
    k: int
    dtype: torch.dtype
    ambient: Any
    trains: bool

    @property
    def backend(self) -> Backend:
        return self.experts.backend

    def to_experts(self, x_TD: torch.Tensor, slot_order: torch.Tensor, row_order: torch.Tensor | None) -> torch.Tensor:
        """What is a token's, to the rows of its experts: ``(T, D)`` to ``(R, D)``."""
        x_RD = self.travel(self.backend.take(x_TD, slot_order // self.k))
        return x_RD if row_order is None else self.backend.take(x_RD, row_order)

    def inverses(
        self, slot_order: torch.Tensor, row_order: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The orders that undo these: where each slot of a token is, ``(T, K)``, and where each row."""
        return inverse(slot_order).view(-1, self.k), None if row_order is None else inverse(row_order)

    def summed(
        self, x_RD: torch.Tensor, slots_TK: torch.Tensor, rows_R: torch.Tensor | None, weights_TK: torch.Tensor | None
    ) -> torch.Tensor:
        """What is a row's, brought to its token's rank and summed over the token's slots: ``(R, D)`` to ``(T, D)``."""
        x_SD = self.all_to_all.reversed()(x_RD if rows_R is None else self.backend.take(x_RD, rows_R))
        dtype = x_SD.dtype if weights_TK is None else self.dtype
        return self.backend.gather_sum(x_SD, slots_TK, weights_TK, dtype)


class _OnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, experts, groups, rows_RD, scale_R, *tensors):
        ctx.experts, ctx.groups, ctx.ambient = experts.holding([None] * 8), groups, _ambient(rows_RD)
        with _no_autocast(rows_RD):
            pre, act = experts.forward_up(rows_RD, groups)
            out = experts.forward_down(pre, act, groups, ctx.ambient)
        trains_up = any(ctx.needs_input_grad[4:8])
        ctx.save_for_backward(pre, rows_RD if trains_up else None, scale_R, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD):
        pre, rows_RD, scale_R, *tensors = ctx.saved_tensors
        experts, groups, needed = ctx.experts.holding(tensors), ctx.groups, ctx.needs_input_grad[4:]
        backend, up = experts.backend, experts.up
        with _no_autocast(grad_RD):
            grad_RD = grad_RD.to(pre.dtype).contiguous()
            grad_pre, grad_scale, down_grads = experts.backward(pre, grad_RD, groups, ctx.ambient, scale_R, needed[4:])
            del grad_RD
            up_grads = (
                up.grad_tensors(backend, rows_RD, grad_pre, groups, needed[:4]) if any(needed[:4]) else [None] * 4
            )
            grad_rows = up.grad_rows(backend, grad_pre, groups) if ctx.needs_input_grad[2] else None
            if scale_R is not None:
                grad_scale = grad_scale.to(scale_R.dtype)
        return None, None, grad_rows, grad_scale, *up_grads, *down_grads


class _Up(torch.autograd.Function):
    """Dispatch and first linear. Keeps for ``_Down`` too, whose backward comes first and leaves here what it took."""

    @staticmethod
    def forward(ctx, call, handed, slot_order, row_order, hidden_TD, weights_TK, *tensors):
        ctx.call, ctx.weights_dtype = call, weights_TK.dtype
        with _no_autocast(hidden_TD):
            rows_RD = call.to_experts(hidden_TD, slot_order, row_order)
            pre, act = call.experts.holding(tensors).forward_up(rows_RD, call.groups)
        if call.trains:
            is_gathered_again = row_order is None
            inputs = hidden_TD if is_gathered_again else rows_RD
            scale = weights_TK if is_gathered_again else call.travel(slot_weights(weights_TK)[slot_order])[row_order]
            trains_up = any(ctx.needs_input_grad[6:10])
            ctx.save_for_backward(pre, slot_order, row_order, scale, inputs if trains_up else None, *tensors)
        handed.append((ctx, act))
        return pre

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_pre):
        # The contract with _Down: its backward runs before, once for each of this one's. So it is in any backward
        # through the layer's output, also in a second one with retain_graph=True.
        assert ctx.left is not None, (
            "the backward of the experts' first linear ran without that of their second, whose gradients it takes: "
            "differentiate through the layer's output"
        )
        (slot_order, row_order, inputs, tensors, grad_scale), ctx.left = ctx.left, None
        call, needed = ctx.call, ctx.needs_input_grad[6:]
        experts = call.experts.holding(tensors)
        up, up_grads, grad_hidden, grad_weights = experts.up, [None] * 4, None, None
        slots_TK, rows_R = call.inverses(slot_order, row_order)
        with _no_autocast(grad_pre):
            if inputs is not None:
                rows_RD = inputs if row_order is not None else call.to_experts(inputs, slot_order, None)
                up_grads = up.grad_tensors(call.backend, rows_RD, grad_pre, call.groups, needed[:4])
                del rows_RD, inputs
            if ctx.needs_input_grad[4]:
                grad_rows = up.grad_rows(call.backend, grad_pre, call.groups)
                grad_hidden = call.summed(grad_rows, slots_TK, rows_R, None)
            if ctx.needs_input_grad[5]:
                grad_scale = call.all_to_all.reversed()(grad_scale if rows_R is None else grad_scale[rows_R])
                grad_weights = grad_scale[slots_TK].to(ctx.weights_dtype)
        return None, None, None, None, grad_hidden, grad_weights, *up_grads, *([None] * 4)


class _Down(torch.autograd.Function):
    """Activation, second linear and combine. Keeps nothing."""

    @staticmethod
    def forward(ctx, call, handed, slot_order, row_order, pre, weights_TK, *tensors):
        (ctx.up, act), ctx.call = handed.pop(), call
        experts = call.experts.holding([None] * 4 + list(tensors))
        with _no_autocast(pre):
            out_RD = experts.forward_down(pre, act, call.groups, call.ambient)
            del act
            return call.summed(out_RD, *call.inverses(slot_order, row_order), weights_TK)

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
        ctx.up.left = slot_order, row_order, inputs, tensors, grad_scale
        return None, None, None, None, grad_pre, None, *down_grads


def _columns(vector: torch.Tensor) -> torch.Tensor:
    return vector.unsqueeze(-1).expand(*vector.shape, _COLUMNS).contiguous()


def _no_autocast(like: torch.Tensor) -> Any:
    device = like.device.type
    is_there = torch.amp.is_autocast_available(device)  # not on meta
    return torch.autocast(device, enabled=False) if is_there else contextlib.nullcontext()


def _ambient(like: torch.Tensor) -> Any:
    """The autocast around a forward, for its activation, there and in backward."""
    device = like.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False)
