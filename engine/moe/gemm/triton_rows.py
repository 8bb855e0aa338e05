"""Triton kernels that read rows once: gathers and sums of rows, the gated activation, and the table of tiles.

No kernel uses atomics, so results are deterministic. Sums are in float32. ``index``, ``scale``, ``bias`` and ``order``
may be None.
"""

import triton
import triton.language as tl

__all__ = [
    "activation",
    "add",
    "gate",
    "gate_backward",
    "gate_gradients",
    "gather_sum",
    "load_halves",
    "row_dot",
    "store_rows",
    "store_halves",
    "sum_columns",
    "sum_rows",
    "take",
    "tile_table",
]


# Kernels use only builtins of Triton's language. Its jitted functions (zeros, sum, sigmoid) are interpreted only if
# TRITON_INTERPRET is set before the first import of Triton.
@triton.jit
def add(a, b):
    return a + b


@triton.jit
def sum_columns(x):
    return tl.reduce(x, 1, add)


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["index"])
def take(x, index, out, R, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows, columns = tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sources = tl.load(index + first + rows, mask=rows < R - first, other=0).to(tl.int64)
    inside = (rows < R - first)[:, None] & (columns < width)[None, :]
    values = tl.load(x + sources[:, None] * width + columns[None, :], mask=inside)
    tl.store(out + first * width + rows[:, None] * width + columns[None, :], values, mask=inside)


@triton.jit
def gather_sum(rows, slots, weights, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for k in range(K):
        slot = tl.load(slots + token * K + k).to(tl.int64)
        values = tl.load(rows + slot * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        if weights is not None:
            values *= tl.load(weights + token * K + k).to(tl.float32)
        total += values
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def tile_table(
    counts, expert_of, first_of, end_of, tile_first, tile_end, EXPERTS, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Store a tile's expert, first row and end of the expert's rows; the first program stores each expert's tiles."""
    tile = tl.program_id(0)
    e = tl.arange(0, WIDTH)
    count = tl.load(counts + e, mask=e < EXPERTS, other=0).to(tl.int32)
    tiles = (count + SIZE - 1) // SIZE
    rows_end, tiles_end = tl.associative_scan(count, 0, add), tl.associative_scan(tiles, 0, add)
    if tile == 0:
        tl.store(tile_first + e, tiles_end - tiles, mask=e < EXPERTS)
        tl.store(tile_end + e, tiles_end, mask=e < EXPERTS)
    expert = tl.reduce(tl.where((e < EXPERTS) & (tiles_end <= tile), 1, 0), 0, add)
    first = rows_end - count + (tile - tiles_end + tiles) * SIZE
    tl.store(expert_of + tile, expert)
    # Tiles past the last group are empty: first >= end.
    tl.store(first_of + tile, tl.reduce(tl.where(e == expert, first, 0), 0, add))
    tl.store(end_of + tile, tl.reduce(tl.where(e == expert, rows_end, 0), 0, add))


@triton.jit(do_not_specialize_on_alignment=["index"])
def sum_rows(
    x,
    index,
    scale,
    out,
    first_of,
    end_of,
    N,
    AT_MOST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum each segment's rows of ``x`` ``(R, N)`` or ``x[index]``, times ``scale``, into a row of ``out``."""
    segment = tl.program_id(1)
    begin = tl.load(first_of + segment)
    end = tl.minimum(tl.load(end_of + segment), begin + AT_MOST)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        sources = tl.load(index + rows, mask=rows < end, other=0) if index is not None else rows
        at = x + sources.to(tl.int64)[:, None] * N + columns[None, :]
        values = tl.load(at, mask=(rows < end)[:, None] & (columns < N)[None, :], other=0.0).to(tl.float32)
        if scale is not None:
            values *= tl.load(scale + rows, mask=rows < end, other=0.0).to(tl.float32)[:, None]
        total += values
    at = out + segment.to(tl.int64) * N + columns
    tl.store(at, tl.reduce(total, 0, add).to(out.dtype.element_ty), mask=columns < N)


@triton.jit(do_not_specialize_on_alignment=["index"])
def row_dot(x, index, vectors, out, expert_of, first_of, end_of, EXPERTS, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply each row of ``x`` ``(R, N)``, or ``x[index]``, by its expert's vector; ``ROWS`` rows per program."""
    tile = tl.program_id(1)
    expert = tl.load(expert_of + tile).to(tl.int64)
    if expert < EXPERTS:
        first = tl.load(first_of + tile) + tl.program_id(0) * ROWS
        rows = tl.arange(0, ROWS)
        in_rows = rows < tl.load(end_of + tile) - first
        sources = tl.load(index + first + rows, mask=in_rows, other=0) if index is not None else first + rows
        at = x + sources.to(tl.int64)[:, None] * N
        total = tl.full((ROWS, BLOCK), 0.0, tl.float32)
        for begin in range(0, N, BLOCK):
            n = begin + tl.arange(0, BLOCK)
            vector = tl.load(vectors + expert * N + n, mask=n < N, other=0.0).to(tl.float32)
            values = tl.load(at + n[None, :], mask=in_rows[:, None] & (n < N)[None, :], other=0.0)
            total += values.to(tl.float32) * vector[None, :]
        tl.store(out + first + rows, sum_columns(total), mask=in_rows)


@triton.jit
def load_halves(pre, rows, in_rows, begin, INNER, INTERLEAVED: tl.constexpr, BN: tl.constexpr):
    """Load gates and ups of rows of ``pre`` ``(R, 2 * INNER)`` from column ``begin`` on, as float32 ``(rows, BN)``."""
    if INTERLEAVED:
        n = 2 * begin + tl.arange(0, 2 * BN)
        at = pre + rows[:, None] * (2 * INNER) + n[None, :]
        both = tl.load(at, mask=in_rows[:, None] & (n < 2 * INNER)[None, :], other=0.0)
        g, u = tl.split(tl.reshape(both, (rows.shape[0], BN, 2)))
    else:
        n = begin + tl.arange(0, BN)
        at = pre + rows[:, None] * (2 * INNER) + n[None, :]
        mask = in_rows[:, None] & (n < INNER)[None, :]
        g, u = tl.load(at, mask=mask, other=0.0), tl.load(at + INNER, mask=mask, other=0.0)
    return g.to(tl.float32), u.to(tl.float32)


@triton.jit
def store_halves(pre, g, u, rows, in_rows, begin, INNER, INTERLEAVED: tl.constexpr):
    """Store gates and ups where ``load_halves`` loads them."""
    BM: tl.constexpr = g.shape[0]
    BN: tl.constexpr = g.shape[1]
    g, u = g.to(pre.dtype.element_ty), u.to(pre.dtype.element_ty)
    if INTERLEAVED:
        n = 2 * begin + tl.arange(0, 2 * BN)
        at = pre + rows[:, None] * (2 * INNER) + n[None, :]
        both = tl.reshape(tl.join(g, u), (BM, 2 * BN))
        tl.store(at, both, mask=in_rows[:, None] & (n < 2 * INNER)[None, :])
    else:
        n = begin + tl.arange(0, BN)
        at = pre + rows[:, None] * (2 * INNER) + n[None, :]
        mask = in_rows[:, None] & (n < INNER)[None, :]
        tl.store(at, g, mask=mask)
        tl.store(at + INNER, u, mask=mask)


@triton.jit
def store_rows(out, values, rows, in_rows, begin, N):
    """Store values into rows of ``out`` ``(R, N)`` from column ``begin`` on."""
    n = begin + tl.arange(0, values.shape[1])
    at = out + rows[:, None] * N + n[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=in_rows[:, None] & (n < N)[None, :])


@triton.jit
def activation(g, u, alpha, beta, limit, LIMITED: tl.constexpr):
    if LIMITED:
        g, u = tl.minimum(g, limit), tl.maximum(tl.minimum(u, limit), -limit)
    return g * (1.0 / (1.0 + tl.exp(-alpha * g))) * (u + beta)


@triton.jit
def gate_gradients(d, g_all, u_all, alpha, beta, limit, LIMITED: tl.constexpr):
    """Return the gradients of gates and ups for the gradient ``d`` of the activation."""
    g, u = g_all, u_all
    if LIMITED:
        g, u = tl.minimum(g_all, limit), tl.maximum(tl.minimum(u_all, limit), -limit)
    s = 1.0 / (1.0 + tl.exp(-alpha * g))
    d_gate = d * (u + beta) * (s + alpha * g * s * (1.0 - s))
    d_up = d * g * s
    if LIMITED:
        d_gate = tl.where(g_all <= limit, d_gate, 0.0)
        d_up = tl.where((u_all <= limit) & (u_all >= -limit), d_up, 0.0)
    return d_gate, d_up


# R differs between micro-batches; specialising on it would recompile during a run.
@triton.jit(do_not_specialize=["R"])
def gate(
    pre,
    act,
    R,
    INNER,
    alpha,
    beta,
    limit,
    INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the activation ``(R, INNER)`` of a pre-activation ``(R, 2 * INNER)``."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows, begin = tl.arange(0, ROWS), tl.program_id(1) * BLOCK
    in_rows = rows < R - first
    g, u = load_halves(pre + first * 2 * INNER, rows, in_rows, begin, INNER, INTERLEAVED, BLOCK)
    out = activation(g, u, alpha, beta, limit, LIMITED)
    store_rows(act + first * INNER, out, rows, in_rows, begin, INNER)


@triton.jit(do_not_specialize=["R"])
def gate_backward(
    pre,
    grad,
    scale,
    grad_pre,
    act,
    grad_scale,
    R,
    INNER,
    alpha,
    beta,
    limit,
    INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of ``pre``, and ``act``, both times ``scale``; and the gradient of ``scale``."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    in_rows = rows < R - first
    pre += first * 2 * INNER
    grad_pre += first * 2 * INNER
    grad += first * INNER
    act += first * INNER
    if scale is not None:
        by = tl.load(scale + first + rows, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    total = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    for begin in range(0, INNER, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        mask, at = in_rows[:, None] & (n < INNER)[None, :], rows[:, None] * INNER + n[None, :]
        g, u = load_halves(pre, rows, in_rows, begin, INNER, INTERLEAVED, BLOCK)
        d = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        out = activation(g, u, alpha, beta, limit, LIMITED)
        if scale is not None:
            total += d * out
            d, out = d * by, out * by
        tl.store(act + at, out.to(act.dtype.element_ty), mask=mask)
        d_gate, d_up = gate_gradients(d, g, u, alpha, beta, limit, LIMITED)
        store_halves(grad_pre, d_gate, d_up, rows, in_rows, begin, INNER, INTERLEAVED)
    if scale is not None:
        tl.store(grad_scale + first + rows, sum_columns(total), mask=in_rows)
