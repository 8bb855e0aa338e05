"""The experts' operators in Triton; tests compare them with ``backends.TorchBackend``.

No kernel uses atomics, so results are deterministic; nothing waits for the device. GEMMs accumulate in float32. With
``TRITON_INTERPRET=1``, set before this file is imported, the kernels run on a CPU, for tests.
"""

import itertools
import math
import weakref
from typing import Any, NamedTuple

import torch
import triton

from . import triton_kernels
from .backends import Groups, TorchBackend, has_native_grouped_mm, supports_grouped_mm, zeroes_empty_groups

__all__ = ["Gate", "MixedBackend", "TritonBackend"]

_INTERPRETED = triton.knobs.runtime.interpret
_WIDEST = 16 if _INTERPRETED else 1024  # columns of a row that one program copies


class Gate(NamedTuple):
    """A gated activation: ``g * sigmoid(alpha * g) * (u + beta)``, ``g <= limit``, ``-limit <= u <= limit``."""

    alpha: float
    beta: float
    limit: float
    interleaved: bool

    def columns(self, inner: int) -> tuple[int, int]:
        """Return the column distance of neighbouring gates, and that of a gate and its up, in the pre-activation."""
        return (2, 1) if self.interleaved else (1, inner)

    def __call__(self, pre: torch.Tensor) -> torch.Tensor:
        step, up = self.columns(pre.shape[-1] // 2)
        g, u = (pre[..., ::2], pre[..., 1::2]) if step == 2 else (pre[..., :up], pre[..., up:])
        g, u = g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        return g * torch.sigmoid(self.alpha * g) * (u + self.beta)


class TritonBackend:
    """Launches the kernels of ``triton_kernels.py``."""

    name = "triton"

    def take(self, x_TD, tokens_S):
        x_TD, width = x_TD.contiguous(), x_TD.shape[1]
        out = x_TD.new_empty(tokens_S.shape[0], width)
        block = min(triton.next_power_of_2(width), _WIDEST)
        if out.numel():
            triton_kernels.take[(out.shape[0], triton.cdiv(width, block))](x_TD, tokens_S, out, width, BLOCK=block)
        return out

    def gather_sum(self, rows_SD, slots_TK, weights_TK, dtype):
        (tokens, k), width = slots_TK.shape, rows_SD.shape[1]
        out = rows_SD.new_empty(tokens, width, dtype=dtype)
        block = min(triton.next_power_of_2(width), _WIDEST)
        weighted = weights_TK is not None
        if out.numel():
            weights = weights_TK.contiguous() if weighted else rows_SD
            triton_kernels.gather_sum[(tokens, triton.cdiv(width, block))](
                rows_SD.contiguous(), slots_TK.contiguous(), weights, out, width, K=k, WEIGHTED=weighted, BLOCK=block
            )
        return out

    def mm(self, rows, in_out, groups, bias=None):
        out = rows.new_empty(groups.rows, in_out.shape[2])
        blocks = _Blocks.of(rows)
        if out.numel():
            tiles = _tiles(groups, blocks.m)
            triton_kernels.grouped_mm[(len(tiles.expert), triton.cdiv(in_out.shape[2], blocks.n))](
                rows.contiguous(),
                in_out,
                in_out if bias is None else bias.contiguous(),
                out,
                *tiles,
                in_out.shape[0],
                in_out.shape[2],
                in_out.shape[1],
                *in_out.stride(),
                HAS_BIAS=bias is not None,
                **blocks.constants(),
            )
        return out

    def outer(self, a, b, groups):
        experts, blocks = groups.counts_e.shape[0], _Blocks.of(a)
        out = a.new_empty(experts, a.shape[1], b.shape[1])
        if not groups.rows:
            return out.zero_()
        grid = (experts, triton.cdiv(a.shape[1], blocks.m), triton.cdiv(b.shape[1], blocks.n))
        a, b = a.contiguous(), b.contiguous()
        triton_kernels.grouped_outer[grid](a, b, out, groups.offsets_e, a.shape[1], b.shape[1], **blocks.constants())
        return out

    def gate(self, module, dtype):
        if module not in _gates:
            _gates[module] = _known_gate(module) if module.has_gate else None
        return _gates[module]

    def up_gate(self, rows, in_out, groups, bias, gate):
        inner = in_out.shape[2] // 2
        pre, act = rows.new_empty(groups.rows, 2 * inner), rows.new_empty(groups.rows, inner)
        blocks = _Blocks.of(rows, halves=True)
        if act.numel():
            tiles = _tiles(groups, blocks.m)
            triton_kernels.grouped_mm_gate[(len(tiles.expert), triton.cdiv(inner, blocks.n))](
                rows.contiguous(),
                in_out,
                in_out if bias is None else bias.contiguous(),
                pre,
                act,
                *tiles,
                in_out.shape[0],
                inner,
                in_out.shape[1],
                *in_out.stride(),
                *gate.columns(inner),
                gate.alpha,
                gate.beta,
                gate.limit,
                HAS_BIAS=bias is not None,
                **blocks.constants(),
            )
        return pre, act

    def down_gate_backward(self, grad, out_in, groups, pre, scale_R, gate):
        inner, blocks = out_in.shape[2], _Blocks.of(grad)
        grad_pre, act = torch.empty_like(pre), pre.new_empty(groups.rows, inner)
        # One partial sum per row and block of columns; they are added in a fixed order, so the result is deterministic.
        parts = grad.new_zeros(triton.cdiv(inner, blocks.n), groups.rows, dtype=torch.float32)
        if act.numel():
            tiles = _tiles(groups, blocks.m)
            triton_kernels.grouped_mm_gate_backward[(len(tiles.expert), len(parts))](
                grad.contiguous(),
                out_in,
                pre,
                grad if scale_R is None else scale_R.contiguous(),
                grad_pre,
                act,
                parts,
                *tiles,
                out_in.shape[0],
                inner,
                out_in.shape[1],
                groups.rows,
                *out_in.stride(),
                *gate.columns(inner),
                gate.alpha,
                gate.beta,
                gate.limit,
                SCALED=scale_R is not None,
                **blocks.constants(),
            )
        return grad_pre, act, None if scale_R is None else parts.sum(0)


class MixedBackend(TritonBackend):
    """Torch's grouped GEMM in bfloat16 where it has a kernel for the GPU, and that kernel is right; else Triton."""

    name = "mixed"
    _torch = TorchBackend()

    def mm(self, rows, in_out, groups, bias=None):
        is_native = bias is None and _native(rows, in_out)
        return (self._torch.mm if is_native else super().mm)(rows, in_out, groups, bias)

    def outer(self, a, b, groups):
        is_native = _native(a, b) and zeroes_empty_groups()
        return (self._torch.outer if is_native else super().outer)(a, b, groups)

    def gate(self, module, dtype):
        return None if dtype == torch.bfloat16 and has_native_grouped_mm() else super().gate(module, dtype)


_gates: "weakref.WeakKeyDictionary[Any, Gate | None]" = weakref.WeakKeyDictionary()


def _known_gate(module: Any) -> Gate | None:
    """Find the ``Gate`` that computes what the module's ``_apply_gate`` does, by trying, also beyond its limit."""
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


def _native(rows: torch.Tensor, other: torch.Tensor) -> bool:
    return supports_grouped_mm(rows, other) and (rows.device.type == "cpu" or has_native_grouped_mm())


class _Blocks(NamedTuple):
    """Tile sizes of a GEMM, its warps, and whether its operands are cast to float32."""

    m: int
    n: int
    k: int
    warps: int
    upcast: bool

    @classmethod
    def of(cls, rows: torch.Tensor, halves: bool = False) -> "_Blocks":
        """Choose them for operands like ``rows``; ``halves`` where a kernel has two accumulators."""
        if _INTERPRETED:
            # The interpreter (Triton 3.9) multiplies the bits of bfloat16 as integers.
            return cls(16, 16, 16, 4, rows.dtype == torch.bfloat16)
        if rows.dtype == torch.float32:
            return cls(64, 32 if halves else 64, 32, 4, False)
        return cls(128, 64 if halves else 128, 64, 8, False)

    def constants(self) -> dict[str, Any]:
        return {"BM": self.m, "BN": self.n, "BK": self.k, "UPCAST": self.upcast, "num_warps": self.warps}


class _Tiles(NamedTuple):
    """Each tile's expert (the number of experts means no tile), its first row, and the end of the expert's rows."""

    expert: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor


def _tiles(groups: Groups, size: int) -> _Tiles:
    """Build ``R // size + e`` tiles, an upper bound, so that their number takes no host sync."""
    if size not in groups.tiles:
        counts, ends = groups.counts_e, groups.offsets_e
        tiles_e = (counts + size - 1) // size
        ends_e = tiles_e.cumsum(0)
        tile = torch.arange(groups.rows // size + len(counts), device=counts.device)
        expert = torch.searchsorted(ends_e, tile, right=True)
        own = expert.clamp(max=len(counts) - 1)
        first = (ends - counts)[own] + (tile - (ends_e - tiles_e)[own]) * size
        groups.tiles[size] = _Tiles(expert.int(), first.int(), ends[own])
    return groups.tiles[size]
