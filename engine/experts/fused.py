"""The whole experts' computation as one autograd function, which keeps its input and the pre-activation and no more.

Everything else is computed again in backward: the activation, by the module's own code, and the gathered rows, by
gathering them again. What a routing weight ``w`` scales is never kept for its gradient: with ``out = act @ W``

    <grad, out> = <grad @ W.T, act>

and ``grad @ W.T`` is needed anyway (SonicMoE, arXiv:2512.14080, section 3). So the memory per (token, expert) pair is
``2 * I`` elements on a single rank, and ``D + 2 * I`` of a row that was sent here, where autograd would keep
``2 * D + 4 * I``.

``on_tokens`` is for experts that are all on this rank; ``on_rows`` for rows that were sent here, whose routing weights
scale them at home and came along for their gradient.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .backends import Backend, Groups
from .dispatch import inverse, plan

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

    def forward(self, rows: torch.Tensor, groups: Groups, ambient: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Pre-activation and output."""
        gate = self.backend.gate(self.module, self.down.weight.dtype) if self.up.lora_A is None else None
        if gate is not None:
            pre, act = self.backend.up_gate(rows, self.up.in_out, groups, self.up.bias, gate)
        else:
            pre = self.up.forward(self.backend, rows, groups)
            with ambient:
                act = self.activation(pre)
        return pre, self.down.forward(self.backend, act, groups)

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
            ``dispatch.scaled_at_home`` has it. ``None``: it is the output's.
    """
    experts = _Experts(module, backend, up, down)
    return _OnRows.apply(experts, Groups(counts_e, rows_RD.shape[0]), rows_RD, scale_R, *experts.tensors)


def on_tokens(
    module: Any,
    backend: Backend,
    up: Linear,
    down: Linear,
    hidden_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What all experts, on this rank, make of tokens: ``(T, D)`` in ``dtype``, weighted and summed over ``K``.

    Args:
        hidden_TD: in the dtype of the weights.
        experts_TK: read only; a token may list an expert twice.
        weights_TK: any float dtype.
    """
    experts = _Experts(module, backend, up, down)
    (route,) = plan(experts_TK, up.weight.shape[0], None)
    groups = Groups(route.counts_e, experts_TK.numel())
    return _OnTokens.apply(experts, groups, route.slot_order, dtype, hidden_TD, weights_TK, *experts.tensors)


class _OnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, experts, groups, rows_RD, scale_R, *tensors):
        ctx.experts, ctx.groups, ctx.ambient = experts.holding([None] * 8), groups, _ambient(rows_RD)
        with _no_autocast(rows_RD):
            pre, out = experts.forward(rows_RD, groups, ctx.ambient)
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


class _OnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, experts, groups, order_S, dtype, hidden_TD, weights_TK, *tensors):
        ctx.experts, ctx.groups, ctx.ambient = experts.holding([None] * 8), groups, _ambient(hidden_TD)
        backend, k = experts.backend, weights_TK.shape[1]
        with _no_autocast(hidden_TD):
            pre, out = experts.forward(backend.take(hidden_TD, order_S // k), groups, ctx.ambient)
            output_TD = backend.gather_sum(out, inverse(order_S).view_as(weights_TK), weights_TK, dtype)
        trains_up = any(ctx.needs_input_grad[6:10])
        ctx.save_for_backward(pre, order_S, weights_TK, hidden_TD if trains_up else None, *tensors)
        return output_TD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        pre, order_S, weights_TK, hidden_TD, *tensors = ctx.saved_tensors
        experts, groups, needed = ctx.experts.holding(tensors), ctx.groups, ctx.needs_input_grad[6:]
        backend, up, slots_TK = experts.backend, experts.up, inverse(order_S).view_as(weights_TK)
        tokens_S = order_S // weights_TK.shape[1]
        with _no_autocast(grad_TD):
            grad_RD = backend.take(grad_TD.to(pre.dtype).contiguous(), tokens_S)
            scale_R = weights_TK.reshape(-1)[order_S]
            grad_pre, grad_scale, down_grads = experts.backward(pre, grad_RD, groups, ctx.ambient, scale_R, needed[4:])
            del grad_RD
            up_grads = [None] * 4
            if hidden_TD is not None:
                rows_RD = backend.take(hidden_TD, tokens_S)
                up_grads = up.grad_tensors(backend, rows_RD, grad_pre, groups, needed[:4])
                del rows_RD
            grad_hidden = None
            if ctx.needs_input_grad[4]:
                grad_rows = up.grad_rows(backend, grad_pre, groups)
                grad_hidden = backend.gather_sum(grad_rows, slots_TK, None, grad_rows.dtype)
            grad_weights = grad_scale[slots_TK].to(weights_TK.dtype) if ctx.needs_input_grad[5] else None
        return None, None, None, None, grad_hidden, grad_weights, *up_grads, *down_grads


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
