"""The gated activations that the Triton kernels compute, and which of them an experts module has."""

import itertools
import math
import weakref
from typing import Any, NamedTuple

import torch

__all__ = ["Gate", "gate_of"]


class Gate(NamedTuple):
    """A gated activation: ``g * sigmoid(alpha * g) * (u + beta)``, ``g <= limit``, ``-limit <= u <= limit``.

    Args:
        is_interleaved: gates are the even columns of the pre-activation and ups the odd; else its two halves.
    """

    alpha: float
    beta: float
    limit: float
    is_interleaved: bool

    def __call__(self, pre: torch.Tensor) -> torch.Tensor:
        inner = pre.shape[-1] // 2
        g, u = (pre[..., ::2], pre[..., 1::2]) if self.is_interleaved else (pre[..., :inner], pre[..., inner:])
        g, u = g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        return g * torch.sigmoid(self.alpha * g) * (u + self.beta)

    def constants(self) -> dict[str, Any]:
        """Return what a kernel that computes it is compiled for."""
        return {"INTERLEAVED": self.is_interleaved, "LIMITED": self.limit < math.inf}


_gates: "weakref.WeakKeyDictionary[Any, Gate | None]" = weakref.WeakKeyDictionary()


def gate_of(module: Any) -> Gate | None:
    """Return the ``Gate`` that computes what the module's ``_apply_gate`` does, ``None`` if none does."""
    if module not in _gates:
        _gates[module] = _known_gate(module) if module.has_gate else None
    return _gates[module]


def _known_gate(module: Any) -> Gate | None:
    """Find it by trying, also beyond its limit."""
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
