"""The gated activations that the backends compute, in torch, and the one of an experts module."""

import itertools
import math
import weakref
from typing import Any, NamedTuple

import torch
from torch.nn import functional

__all__ = ["Gate", "gate_of"]


class Gate(NamedTuple):
    """A gated activation: ``g * sigmoid(alpha * g) * (u + beta)``, ``g <= limit``, ``-limit <= u <= limit``."""

    alpha: float
    beta: float
    limit: float
    is_interleaved: bool  # gates are the even columns of the pre-activation and ups the odd; else the two halves

    def __call__(self, pre: torch.Tensor) -> torch.Tensor:
        z, u = self._inputs(*self.halves(pre))
        return self._gated(z) * u

    def halves(self, pre: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the gates and of the ups."""
        inner = pre.shape[-1] // 2
        return (pre[..., ::2], pre[..., 1::2]) if self.is_interleaved else (pre[..., :inner], pre[..., inner:])

    def _inputs(self, g: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``alpha * g`` and ``u + beta``, clamped to the limit."""
        if self.limit < math.inf:
            g, u = g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        return self.alpha * g if self.alpha != 1 else g, u + self.beta if self.beta else u

    def _gated(self, z: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(z)
        return gated / self.alpha if self.alpha != 1 else gated

    def backward(
        self, pre: torch.Tensor, grad: torch.Tensor, scale: torch.Tensor | None, grad_pre: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write the gradient of ``pre``; return the activation times ``scale``, and the gradient of ``scale``."""
        halves, (to_g, to_u) = self.halves(pre), self.halves(grad_pre)
        z, u = self._inputs(*halves)
        gated = self._gated(z)
        act, grad_scale = gated * u, None
        if scale is not None:
            scale = scale.unsqueeze(-1)
            grad_scale = (grad * act).sum(-1)
            grad, act = grad * scale, act.mul_(scale)
        torch.mul(grad, gated, out=to_u)
        # d gated / d g = d silu(z) / d z.
        torch.ops.aten.silu_backward.grad_input(grad * u, z, grad_input=to_g)
        if self.limit < math.inf:
            to_g.masked_fill_(halves[0] > self.limit, 0)
            to_u.masked_fill_(halves[1].abs() > self.limit, 0)
        return act, grad_scale

    def constants(self) -> dict[str, Any]:
        """Return the constants of a Triton kernel that computes the activation."""
        return {"INTERLEAVED": self.is_interleaved, "LIMITED": self.limit < math.inf}


_gates: "weakref.WeakKeyDictionary[Any, Gate | None]" = weakref.WeakKeyDictionary()


def gate_of(module: Any) -> Gate | None:
    """Return the ``Gate`` that equals the module's ``_apply_gate``; ``None`` if there is none."""
    if module not in _gates:
        _gates[module] = _known_gate(module) if module.has_gate else None
    return _gates[module]


def _known_gate(module: Any) -> Gate | None:
    """Compare ``_apply_gate`` with every ``Gate`` on random inputs, some of them beyond the limit."""
    limits = {math.inf, float(getattr(module, "limit", None) or math.inf)}
    alphas = {1.0, float(getattr(module, "alpha", None) or 1.0)}
    reach = 2 * max(limit for limit in (*limits, 4.0) if limit < math.inf)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        pre = torch.rand(256, 8, generator=generator).mul_(2 * reach).sub_(reach)
        wanted = module._apply_gate(pre.clone())
        for candidate in itertools.product(alphas, (0.0, 1.0), limits, (False, True)):
            gate = Gate(*candidate)
            if wanted.shape == (256, 4) and torch.allclose(gate(pre), wanted, rtol=1e-5, atol=1e-6):
                return gate
    return None
