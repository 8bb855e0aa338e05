"""The kernels that ``triton_backend.py`` launches: gathers and sums of rows, and grouped GEMMs.

No kernel uses atomics. GEMMs accumulate in float32.
"""

import triton
import triton.language as tl

__all__ = [
    "gather_sum",
    "grouped_mm",
    "grouped_mm_gate",
    "grouped_mm_gate_backward",
    "grouped_outer",
    "take",
]


# Only builtins of Triton's language: its own jitted functions (zeros, sum, sigmoid) can only be interpreted if
# TRITON_INTERPRET was set before anything imported Triton.
@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def take(x, index, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row).to(tl.int64)
    values = tl.load(x + source * width + columns, mask=columns < width)
    tl.store(out + row * width + columns, values, mask=columns < width)


@triton.jit
def gather_sum(rows, slots, weights, out, width, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for k in range(K):
        slot = tl.load(slots + token * K + k).to(tl.int64)
        values = tl.load(rows + slot * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + token * K + k).to(tl.float32)
        total += values
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _dot(a, b, total, UPCAST: tl.constexpr):
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _product(
    a,
    b,
    rows,
    in_rows,
    columns,
    in_columns,
    K,
    sk,
    sn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Multiply rows of ``a`` ``(R, K)`` by columns of one expert's ``b``; returns float32."""
    total = tl.full((BM, BN), 0.0, tl.float32)
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        a_tile = tl.load(a + rows[:, None] * K + ks[None, :], mask=in_rows[:, None] & (ks < K)[None, :], other=0.0)
        b_at = b + ks[:, None].to(tl.int64) * sk + columns[None, :].to(tl.int64) * sn
        b_tile = tl.load(b_at, mask=(ks < K)[:, None] & in_columns[None, :], other=0.0)
        total = _dot(a_tile, b_tile, total, UPCAST)
    return total


@triton.jit
def grouped_mm(
    a,
    b,
    bias,
    out,
    expert_of,
    first_of,
    end_of,
    EXPERTS,
    N,
    K,
    se,
    sk,
    sn,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(expert_of + tile).to(tl.int64)
    if expert < EXPERTS:
        rows = (tl.load(first_of + tile) + tl.arange(0, BM)).to(tl.int64)
        in_rows = rows < tl.load(end_of + tile)
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        in_columns = columns < N
        total = _product(a, b + expert * se, rows, in_rows, columns, in_columns, K, sk, sn, BM, BN, BK, UPCAST)
        if HAS_BIAS:
            total += tl.load(bias + expert * N + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        at = out + rows[:, None] * N + columns[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def grouped_outer(
    a,
    b,
    out,
    ends,
    M,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    expert = tl.program_id(0)
    ms, ns = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(2) * BN + tl.arange(0, BN)
    begin, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    total = tl.full((BM, BN), 0.0, tl.float32)
    for row in range(begin, end, BK):
        rows = (row + tl.arange(0, BK)).to(tl.int64)
        a_tile = tl.load(a + rows[None, :] * M + ms[:, None], mask=(rows < end)[None, :] & (ms < M)[:, None], other=0.0)
        b_tile = tl.load(b + rows[:, None] * N + ns[None, :], mask=(rows < end)[:, None] & (ns < N)[None, :], other=0.0)
        total = _dot(a_tile, b_tile, total, UPCAST)
    at = out + expert.to(tl.int64) * M * N + ms[:, None].to(tl.int64) * N + ns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(ms < M)[:, None] & (ns < N)[None, :])


@triton.jit
def grouped_mm_gate(
    a,
    b,
    bias,
    pre,
    act,
    expert_of,
    first_of,
    end_of,
    EXPERTS,
    INNER,
    K,
    se,
    sk,
    sn,
    step,
    to_up,
    alpha,
    beta,
    limit,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(expert_of + tile).to(tl.int64)
    if expert < EXPERTS:
        rows = (tl.load(first_of + tile) + tl.arange(0, BM)).to(tl.int64)
        in_rows = rows < tl.load(end_of + tile)
        inner = tl.program_id(1) * BN + tl.arange(0, BN)
        in_inner = inner < INNER
        gates, ups = inner * step, inner * step + to_up
        g = _product(a, b + expert * se, rows, in_rows, gates, in_inner, K, sk, sn, BM, BN, BK, UPCAST)
        u = _product(a, b + expert * se, rows, in_rows, ups, in_inner, K, sk, sn, BM, BN, BK, UPCAST)
        if HAS_BIAS:
            own = bias + expert * 2 * INNER
            g += tl.load(own + gates, mask=in_inner, other=0.0).to(tl.float32)[None, :]
            u += tl.load(own + ups, mask=in_inner, other=0.0).to(tl.float32)[None, :]
        mask = in_rows[:, None] & in_inner[None, :]
        # Rounded as they are kept, so that backward sees the same.
        g, u = g.to(pre.dtype.element_ty), u.to(pre.dtype.element_ty)
        tl.store(pre + rows[:, None] * 2 * INNER + gates[None, :], g, mask=mask)
        tl.store(pre + rows[:, None] * 2 * INNER + ups[None, :], u, mask=mask)
        g = tl.minimum(g.to(tl.float32), limit)
        u = tl.maximum(tl.minimum(u.to(tl.float32), limit), -limit)
        out = g * (1.0 / (1.0 + tl.exp(-alpha * g))) * (u + beta)
        tl.store(act + rows[:, None] * INNER + inner[None, :], out.to(act.dtype.element_ty), mask=mask)


@triton.jit
def grouped_mm_gate_backward(
    grad,
    b,
    pre,
    scale,
    grad_pre,
    act,
    parts,
    expert_of,
    first_of,
    end_of,
    EXPERTS,
    INNER,
    K,
    R,
    se,
    sk,
    sn,
    step,
    to_up,
    alpha,
    beta,
    limit,
    SCALED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(expert_of + tile).to(tl.int64)
    if expert < EXPERTS:
        rows = (tl.load(first_of + tile) + tl.arange(0, BM)).to(tl.int64)
        in_rows = rows < tl.load(end_of + tile)
        inner = tl.program_id(1) * BN + tl.arange(0, BN)
        in_inner = inner < INNER
        mask = in_rows[:, None] & in_inner[None, :]
        gates = rows[:, None] * 2 * INNER + (inner * step)[None, :]
        ups = gates + to_up
        d = _product(grad, b + expert * se, rows, in_rows, inner, in_inner, K, sk, sn, BM, BN, BK, UPCAST)
        g_all = tl.load(pre + gates, mask=mask, other=0.0).to(tl.float32)
        u_all = tl.load(pre + ups, mask=mask, other=0.0).to(tl.float32)
        g, u = tl.minimum(g_all, limit), tl.maximum(tl.minimum(u_all, limit), -limit)
        s = 1.0 / (1.0 + tl.exp(-alpha * g))
        out = g * s * (u + beta)
        if SCALED:
            part = tl.reduce(tl.where(mask, d * out, 0.0), 1, _add)
            tl.store(parts + tl.program_id(1).to(tl.int64) * R + rows, part, mask=in_rows)
            by = tl.load(scale + rows, mask=in_rows, other=0.0).to(tl.float32)[:, None]
            d, out = d * by, out * by
        d_gate = tl.where(g_all <= limit, d * (u + beta) * (s + alpha * g * s * (1.0 - s)), 0.0)
        d_up = tl.where((u_all <= limit) & (u_all >= -limit), d * g * s, 0.0)
        tl.store(grad_pre + gates, d_gate.to(grad_pre.dtype.element_ty), mask=mask)
        tl.store(grad_pre + ups, d_up.to(grad_pre.dtype.element_ty), mask=mask)
        tl.store(act + rows[:, None] * INNER + inner[None, :], out.to(act.dtype.element_ty), mask=mask)
