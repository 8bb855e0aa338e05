"""Rotary embeddings in one kernel for queries and one for keys, forward and backward.

Attention in transformers calls ``apply_rotary_pos_emb`` of its own file, where torch runs some ten kernels. There is no
extension point, so the name is set to a function that computes the same on a GPU and calls the other elsewhere. The
function is replaced only if it rotates halves of random inputs, or neighbours that it first sorts into halves, with the
same bits in bfloat16.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["FusedRotary", "fuse_rotary", "replacements"]

_NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
_HEAD = 16  # columns of random inputs


class FusedRotary:
    """Replaces a function ``(q, k, cos, sin)`` that rotates ``[B, H, T, D]`` by ``[B, T, d]`` with ``d <= D``.

    Args:
        plain: the function.
        is_interleaved: whether neighbouring columns are a pair, which the result has in its two halves.
        takes_parts: whether it leaves columns from ``d`` on as they are.
        device: type of the device on which it is replaced.
    """

    def __init__(self, plain: Callable[..., Any], is_interleaved: bool, takes_parts: bool, device: str = "cuda"):
        functools.update_wrapper(self, plain)
        self.plain, self.is_interleaved, self.takes_parts = plain, is_interleaved, takes_parts
        self.device = device

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args, **kwargs) -> Any:
        if args or kwargs or q.device.type != self.device or not all(self._takes(x, cos, sin) for x in (q, k)):
            return self.plain(q, k, cos, sin, *args, **kwargs)
        return tuple(_Rotated.apply(x, cos, sin, self.is_interleaved) for x in (q, k))

    def _takes(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        (*_, tokens, width), part = x.shape, cos.shape[-1]
        has_known_shapes = x.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape and cos.shape[1] == tokens
        has_columns = part == width or (self.takes_parts and part < width)
        return has_known_shapes and has_columns and part % 2 == 0 and x.dtype == cos.dtype == sin.dtype


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, is_interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        return _rotate(x, cos, sin, is_interleaved)

    @staticmethod
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, ctx.is_interleaved, is_backward=True), None, None, None


def _rotate(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if x.is_meta:
        return x.clone()
    from .triton_rotary import rotate

    return rotate(x, *args, **kwargs)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Rotate by torch's operators what the kernels rotate."""
    part = cos.shape[-1]
    turned, rest = x[..., :part], x[..., part:]
    pairs = turned.unflatten(-1, (-1, 2)).unbind(-1) if is_interleaved else turned.chunk(2, dim=-1)
    first, second = pairs
    turned, halves = torch.cat((first, second), -1), torch.cat((-second, first), -1)
    return torch.cat((turned * cos[:, None] + halves * sin[:, None], rest), -1)


def _fused(plain: Callable[..., Any]) -> FusedRotary | None:
    """Return what replaces a function, found on random inputs; None if it rotates in another way."""
    whole = [kind for kind in (False, True) if _computes(plain, kind, _HEAD)]
    return FusedRotary(plain, whole[0], _computes(plain, whole[0], _HEAD // 2)) if whole else None


@torch.no_grad()
def _computes(plain: Callable[..., Any], is_interleaved: bool, part: int) -> bool:
    """Tell whether a function rotates the first ``part`` columns in this way, bit for bit in bfloat16."""
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = (2, 4, 3, _HEAD), (2, 1, 3, _HEAD), (2, 3, part), (2, 3, part)
    q, k, cos, sin = (torch.randn(shape, generator=generator, device="cpu").bfloat16() for shape in shapes)
    try:
        found = plain(q, k, cos, sin)
        return all(torch.equal(y, _rotated(x, cos, sin, is_interleaved)) for x, y in zip((q, k), found, strict=True))
    except Exception:  # it takes other arguments
        return False


def replacements(model: nn.Module) -> Iterator[tuple[ModuleType, str, Any, FusedRotary | None]]:
    """Yield the functions that rotate in the files of the model's modules: file, name, function, its replacement."""
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name in _NAMES:
            if (function := getattr(file, name, None)) is not None:
                yield file, name, function, _fused(getattr(function, "plain", function))


def fuse_rotary(model: nn.Module) -> dict[str, bool]:
    """Replace the functions that rotate in the files of the model's modules; return of each whether it is replaced."""
    found = {}
    for file, name, _, fused in replacements(model):
        if fused is not None:
            setattr(file, name, fused)
        found[f"{file.__name__}.{name}"] = fused is not None
    return found
