"""RMSNorms of any family, each by one kernel in forward and one in backward.

An eager RMSNorm is some eight kernels. Norms and rotary embeddings take a quarter of a step of Qwen3-30B-A3B on H100s.
There is no list of names: a module with one vector is replaced if it has the bits of an RMSNorm on random inputs.
"""

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..wrap_forward import wrap_forward, wrapped_by

__all__ = ["RmsNorm", "fuse_norms", "rms_norm_of"]

_ROWS = 64  # rows of random inputs


@dataclass(frozen=True)
class RmsNorm:
    """An RMSNorm: ``x / sqrt(mean(x^2) + eps) * (weight + offset)``, in float32.

    Args:
        offset: 1 where weights are stored as their difference from one (Gemma, Qwen3-Next).
        rounds_first: whether values are rounded to the dtype of ``x`` before the product with the weight.
    """

    eps: float
    offset: float = 0.0
    rounds_first: bool = False

    def plain(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute it with torch's operators, ``[..., N]`` by ``[N]``."""
        values = x.float()
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        if self.rounds_first:
            values = values.to(x.dtype).float()
        return (values * (weight.float() + self.offset)).to(x.dtype)

    def fused(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute it with the kernels, with gradients; ``x`` and ``weight`` share a dtype. For meta see ``fuse.py``."""
        return _Fused.apply(x, weight, self)  # type: ignore[no-any-return]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, norm):
        if x.is_meta:
            out, scale = x * weight, x.new_empty(x.shape[:-1], dtype=torch.float32)
        else:
            from . import triton_norms

            out, scale = triton_norms.forward(x, weight, norm.eps, norm.offset, norm.rounds_first)
        ctx.save_for_backward(x, weight, scale)
        ctx.norm = norm
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        if x.is_meta:
            return torch.addcmul(grad, x, weight), torch.empty_like(weight), None
        from . import triton_norms

        return *triton_norms.backward(grad, x, weight, scale, ctx.norm.offset, ctx.norm.rounds_first), None


def rms_norm_of(module: nn.Module) -> RmsNorm | None:
    """Return the RMSNorm that a module, maybe on the meta device, computes on random inputs; None if it is another."""
    params = dict(module.named_parameters())
    if params.keys() != {"weight"} or params["weight"].dim() != 1 or any(True for _ in module.buffers()):
        return None
    trial = copy.deepcopy(module).to_empty(device="cpu").requires_grad_(False)
    numbers = {value for value in vars(module).values() if isinstance(value, float) and value > 0}
    candidates = itertools.starmap(RmsNorm, itertools.product(numbers, (0.0, 1.0), (False, True)))
    found = [(_exact_share(trial, candidate), candidate) for candidate in candidates]
    share, best = max(found, key=lambda each: each[0], default=(0.0, None))
    return best if share > 0.99 else None


@torch.no_grad()
def _exact_share(module: Any, norm: RmsNorm) -> float:
    """Return the share of a module's bfloat16 results with the bits of a norm; 0 if float32 results differ."""
    generator = torch.Generator("cpu").manual_seed(0)
    size, shares = len(module.weight), []
    for dtype, scale in itertools.product((torch.float32, torch.bfloat16), (1.0, 1e-3)):  # eps matters for small inputs
        x = (torch.randn(2, _ROWS // 2, size, generator=generator, device="cpu") * scale).to(dtype)
        module.weight.data = torch.randn(size, generator=generator, device="cpu").to(dtype)
        wanted = norm.plain(x, module.weight)
        try:
            found = module(x)
        except Exception:  # the module takes other arguments, such as a gate
            return 0.0
        if type(found) is not torch.Tensor or found.dtype != dtype or found.shape != x.shape:
            return 0.0
        if not torch.allclose(found, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6):
            return 0.0
        if dtype == torch.bfloat16:
            shares.append((found == wanted).float().mean().item())
    return min(shares)


def fuse_norms(model: nn.Module) -> Counter[str]:
    """Replace the forwards of the model's RMSNorms; return their number by class."""
    known: dict[tuple, RmsNorm | None] = {}
    fused: Counter[str] = Counter()
    for module in model.modules():
        if next(module.children(), None) is not None or not isinstance(getattr(module, "weight", None), nn.Parameter):
            continue
        key = (type(module), module.weight.shape, tuple(v for v in vars(module).values() if isinstance(v, float)))
        if key not in known:
            known[key] = rms_norm_of(module)
        if (norm := known[key]) is not None and not wrapped_by(module):  # LoRA may train a copy of its weight
            wrap_forward(module, "norm", functools.partial(_forward, module, norm))
            fused[type(module).__name__] += 1
    return fused


def _forward(module: Any, norm: RmsNorm, plain: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or x.dtype != module.weight.dtype:
        return plain(x, *args, **kwargs)
    return norm.fused(x, module.weight)
