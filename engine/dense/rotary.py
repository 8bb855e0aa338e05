"""Rotary embeddings in one kernel for queries and one for keys, forward and backward; torch runs some ten each.

Attention in transformers calls a function of its own file. So the name is set to a function that runs the kernel on a
GPU and calls the original elsewhere. There is no list of families: a function is replaced if one of the kernel's
rotations has the same bits in bfloat16 on random inputs.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import nn

__all__ = ["FusedRotary", "Rotation", "fuse_rotary", "replacements", "rotate"]

_NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")
_HEAD, _TOKENS = 16, 24  # head dim and tokens of random inputs
Arguments = Literal["q k cos sin", "x cos sin", "q k complex"]
Table = Literal["halves", "neighbours", "one", "first half"]


@dataclass(frozen=True)
class Rotation:
    """A rotation of the columns ``a`` and ``b`` of each pair to ``a cos - b sin`` and ``b cos + a sin``.

    Pair ``i`` of ``d`` columns is ``i`` and ``i + d / 2`` (halves), or ``2 i`` and ``2 i + 1`` (neighbours).

    Args:
        reads_neighbours, writes_neighbours: whether input and output pairs are neighbours, rather than halves.
        table: a pair's columns of cos and sin; column ``i`` of ``d / 2`` for "one", and of ``d`` for "first half".
        rounds_last: whether products are summed in float32 and rounded once.
        is_last: whether the last ``d`` columns of a wider head are rotated, rather than the first.
    """

    reads_neighbours: bool = False
    writes_neighbours: bool = False
    table: Table = "halves"
    rounds_last: bool = False
    is_last: bool = False

    def columns(self, width: int) -> int:
        """Return ``d`` for tables of ``width`` columns."""
        return 2 * width if self.table == "one" else width

    def plain(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate ``[B, H, T, D]`` by tables ``[B, T, width]`` with torch's operators."""
        part = self.columns(cos.shape[-1])
        first = x.shape[-1] - part if self.is_last else 0
        a, b = (x[..., first + at] for at in _pairs(part, self.reads_neighbours))
        of_table = _pairs(part, self.table == "neighbours")
        at = of_table if self.table in ("halves", "neighbours") else (of_table[0],) * 2
        (cos_a, cos_b), (sin_a, sin_b) = ([t[:, None, :, columns] for columns in at] for t in (cos, sin))
        if self.rounds_last:
            a, b = a.float(), b.float()
        out, to = x.clone(), _pairs(part, self.writes_neighbours)
        out[..., first + to[0]] = (a * cos_a - b * sin_a).to(x.dtype)
        out[..., first + to[1]] = (b * cos_b + a * sin_b).to(x.dtype)
        return out


def _pairs(columns: int, are_neighbours: bool) -> tuple[torch.Tensor, torch.Tensor]:
    pair = torch.arange(columns // 2, device="cpu")
    return (2 * pair, 2 * pair + 1) if are_neighbours else (pair, pair + columns // 2)


@dataclass(eq=False)
class FusedRotary:
    """Replaces ``plain``, a function that rotates queries and keys (or None), or one tensor, on one type of device.

    Args:
        takes_parts: whether ``plain`` keeps the columns beyond the tables' width.
        heads: dims of the heads: 1 in ``[B, H, T, D]``, 2 in ``[B, T, H, D]``, by default of ``unsqueeze_dim`` first.
    """

    plain: Callable[..., Any]
    rotation: Rotation
    takes_parts: bool = False
    arguments: Arguments = "q k cos sin"
    heads: tuple[int, ...] = (1,)
    device: str = "cuda"

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count = 1 if self.arguments == "x cos sin" else 2
        tensors, tables = args[:count], args[count:]
        heads = kwargs.get("unsqueeze_dim", self.heads[0])
        if self.arguments == "q k complex" and len(tables) == 1 and tables[0].is_complex():
            tables = tables[0].real, tables[0].imag
        is_known = len(tables) == 2 and kwargs.keys() <= {"unsqueeze_dim"} and heads in self.heads
        if not is_known or not all(x is None or self._takes(x, heads, *tables) for x in tensors):
            return self.plain(*args, **kwargs)
        cos, sin = tables
        rotated = [
            x if x is None else rotate(x.transpose(1, heads), cos, sin, self.rotation).transpose(1, heads)
            for x in tensors
        ]
        return tuple(rotated) if count == 2 else rotated[0]

    def _takes(self, x: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        if x.device.type != self.device or x.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
            return False
        part, width = self.rotation.columns(cos.shape[-1]), x.shape[-1]
        has_columns = part % 2 == 0 and (part == width or (self.takes_parts and part < width))
        dtypes = {x.dtype, torch.float32} if self.rotation.rounds_last else {x.dtype}
        has_rows = cos.shape[1] == x.shape[3 - heads] and len(cos) in (1, len(x))
        return has_columns and has_rows and cos.dtype == sin.dtype and cos.dtype in dtypes


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Compute ``rotation.plain`` with the kernel, and the gradient of ``x``."""
    return _Rotated.apply(x, cos, sin, rotation)  # type: ignore[no-any-return]


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, rotation):
        ctx.save_for_backward(cos, sin)
        ctx.rotation = rotation
        return _rotate(x, cos, sin, rotation)

    @staticmethod
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, ctx.rotation, is_backward=True), None, None, None


def _rotate(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if x.is_meta:
        return x.clone()
    from . import triton_rotary

    return triton_rotary.rotate(x, *args, **kwargs)


def _fused(plain: Callable[..., Any]) -> FusedRotary | None:
    """Return the replacement of a function, found on random inputs; None if no rotation of the kernel has its bits."""
    flags, tables = (False, True), get_args(Table)
    forms: tuple[tuple[Arguments, int], ...]
    forms = ("q k cos sin", 1), ("x cos sin", 1), ("q k complex", 1), ("q k complex", 2)
    for arguments, heads in forms:
        rounds_last = (True,) if arguments == "q k complex" else flags
        for how in itertools.product(flags, flags, tables, rounds_last):
            rotation = Rotation(*how)
            if not _computes(plain, rotation, arguments, heads, _HEAD):
                continue
            of_part = [Rotation(*how, is_last) for is_last in flags]
            parts = [one for one in of_part if _computes(plain, one, arguments, heads, _HEAD // 2)]
            named = "complex" not in arguments and _computes(plain, rotation, arguments, 2, _HEAD, unsqueeze_dim=2)
            return FusedRotary(plain, (parts or [rotation])[0], bool(parts), arguments, (heads, *(2,) * named))
    return None


@torch.no_grad()
def _computes(
    plain: Callable[..., Any], rotation: Rotation, arguments: str, heads: int, part: int, **kwargs: Any
) -> bool:
    """Whether a function applies the rotation to ``part`` columns, with the same bits in 99 % of bfloat16 results."""
    generator = torch.Generator("cpu").manual_seed(0)
    of_table = 2, _TOKENS, part // 2 if rotation.table == "one" else part
    shapes = (2, 4, _TOKENS, _HEAD), (2, 1, _TOKENS, _HEAD), of_table, of_table
    *tensors, cos, sin = (torch.randn(shape, generator=generator, device="cpu").bfloat16() for shape in shapes)
    tables: tuple[torch.Tensor, ...] = cos, sin
    if arguments == "q k complex":
        cos, sin = cos.float(), sin.float()
        tables = (torch.complex(cos, sin),)
    tensors = tensors[: 1 if arguments == "x cos sin" else 2]
    try:
        found = plain(*(x.transpose(1, heads) for x in tensors), *tables, **kwargs)
        found = found if isinstance(found, tuple) else (found,)
        pairs = [(y.transpose(1, heads), rotation.plain(x, cos, sin)) for x, y in zip(tensors, found, strict=True)]
        return all(y.dtype == torch.bfloat16 and (y == wanted).float().mean() > 0.99 for y, wanted in pairs)
    except Exception:  # the function takes other arguments
        return False


def replacements(model: nn.Module) -> Iterator[tuple[ModuleType, str, Any, FusedRotary | None]]:
    """Yield file, name, function and replacement of the rotary functions in the files of the model's modules."""
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name in _NAMES:
            if (function := getattr(file, name, None)) is not None:
                yield file, name, function, _fused(getattr(function, "plain", function))


def fuse_rotary(model: nn.Module) -> dict[str, bool]:
    """Replace the rotary functions in the files of the model's modules; return by name whether each is replaced."""
    found = {}
    for file, name, plain, fused in replacements(model):
        setattr(file, name, fused or plain)
        found[f"{file.__name__}.{name}"] = fused is not None
    return found
