"""Grouped GEMMs in Triton: rows by experts' matrices, optionally with a gate or its backward, and outer products.

Accumulators are float32, and no kernel uses atomics. A program computes one tile of the result. Neighbouring programs
share the tile of rows (``grouped_mm*``) or the expert (``grouped_outer``), so that their operands stay in the L2 cache.
An address is a 64-bit base of the tile, expert or indexed row, and a 32-bit offset.

Row ``i`` is read through an index, as ``index[i]``, unless that is None. ``grouped_mm*`` load a tile's indices once,
before the sum along ``k``; ``grouped_outer`` sums along the rows and loads them with each block.
"""

import triton
import triton.language as tl

from .triton_rows import activation, gate_gradients, load_halves, store_halves, store_rows, sum_columns

__all__ = ["grouped_mm", "grouped_mm_gate", "grouped_mm_gate_backward", "grouped_outer", "store_gated"]


@triton.jit
def _tile(expert_of, first_of, end_of, N, BM: tl.constexpr, BN: tl.constexpr):
    """Return a program's expert, first row, offsets of ``BM`` rows, their mask, and block of columns."""
    blocks = (N + BN - 1) // BN
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert, first, rows = tl.load(expert_of + tile), tl.load(first_of + tile), tl.arange(0, BM)
    in_rows = rows < tl.load(end_of + tile) - first
    return expert.to(tl.int64), first.to(tl.int64), rows, in_rows, block


@triton.jit
def _product(a, index, first, rows, in_rows, b, columns, in_columns, K, sk, sn, total, BK, EVEN_K):
    """Add to ``total`` the product of rows of ``a``, ``K`` wide, from ``first`` on, and columns of the matrix ``b``."""
    ks = tl.arange(0, BK)
    if index is not None:
        sources = tl.load(index + first + rows, mask=in_rows, other=0).to(tl.int64)
        a_at = a + (sources * K)[:, None] + ks[None, :]
    else:
        a_at = a + first * K + rows[:, None] * K + ks[None, :]
    b_at = b + ks[:, None] * sk + columns[None, :] * sn
    for k in range(0, K, BK):
        if EVEN_K:
            a_tile = tl.load(a_at, mask=in_rows[:, None], other=0.0)
            b_tile = tl.load(b_at, mask=in_columns[None, :], other=0.0)
        else:
            in_k = ks < K - k
            a_tile = tl.load(a_at, mask=in_rows[:, None] & in_k[None, :], other=0.0)
            b_tile = tl.load(b_at, mask=in_k[:, None] & in_columns[None, :], other=0.0)
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
        a_at += BK
        b_at += BK * sk
    return total


@triton.jit
def columns_halved(x):
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def store_gated(pre, act, total, rows, in_rows, begin, INNER, alpha, beta, limit, INTERLEAVED, LIMITED):
    """Store a tile's gates and ups ``total``, and their activation, by halves, which fit into the registers."""
    BM: tl.constexpr = total.shape[0]
    BN: tl.constexpr = total.shape[1] // 2
    halves = columns_halved(total)
    if not INTERLEAVED:
        gates, ups = columns_halved(halves[0]), columns_halved(halves[1])
    for half in tl.static_range(2):
        if INTERLEAVED:
            g, u = tl.split(tl.reshape(halves[half], (BM, BN // 2, 2)))
        else:
            g, u = gates[half], ups[half]
        at = begin + half * (BN // 2)
        # Round as stored, so that backward reads the same values.
        g, u = g.to(pre.dtype.element_ty), u.to(pre.dtype.element_ty)
        store_halves(pre, g, u, rows, in_rows, at, INNER, INTERLEAVED)
        out = activation(g.to(tl.float32), u.to(tl.float32), alpha, beta, limit, LIMITED)
        store_rows(act, out, rows, in_rows, at, INNER)


# The number of rows and the alignment of an index differ between micro-batches. Specialising on them would recompile
# during a run.
@triton.jit(do_not_specialize_on_alignment=["index", "order"])
def grouped_mm(
    a,
    index,
    b,
    bias,
    out,
    order,
    expert_of,
    first_of,
    end_of,
    EXPERTS,
    N,
    K,
    se,
    sk,
    sn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Multiply rows ``a`` ``(R, K)`` by their experts' ``b`` ``(e, K, N)``, and add the bias ``(e, N)``.

    With an order, result ``i`` is stored in row ``order[i]`` of ``out``.
    """
    expert, first, rows, in_rows, block = _tile(expert_of, first_of, end_of, N, BM, BN)
    if expert < EXPERTS:
        columns = block * BN + tl.arange(0, BN)
        in_columns = columns < N
        total = tl.full((BM, BN), 0.0, tl.float32)
        if bias is not None:
            total += tl.load(bias + expert * N + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        own = b + expert * se
        total = _product(a, index, first, rows, in_rows, own, columns, in_columns, K, sk, sn, total, BK, EVEN_K)
        if order is not None:
            to = tl.load(order + first + rows, mask=in_rows, other=0).to(tl.int64)
            store_rows(out, total, to, in_rows, block * BN, N)
        else:
            store_rows(out + first * N, total, rows, in_rows, block * BN, N)


@triton.jit(do_not_specialize_on_alignment=["index"])
def grouped_mm_gate(
    a,
    index,
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
    alpha,
    beta,
    limit,
    INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """``grouped_mm`` and its activation; one product computes a tile's ``BN`` gates and their ups."""
    expert, first, rows, in_rows, block = _tile(expert_of, first_of, end_of, INNER, BM, BN)
    if expert < EXPERTS:
        begin, both = block * BN, tl.arange(0, 2 * BN)
        if INTERLEAVED:
            columns = 2 * begin + both
            in_columns = columns < 2 * INNER
        else:
            columns = begin + both % BN + both // BN * INNER
            in_columns = begin + both % BN < INNER
        total = tl.full((BM, 2 * BN), 0.0, tl.float32)
        if bias is not None:
            total += tl.load(bias + expert * 2 * INNER + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        own = b + expert * se
        total = _product(a, index, first, rows, in_rows, own, columns, in_columns, K, sk, sn, total, BK, EVEN_K)
        pre += first * 2 * INNER
        act += first * INNER
        store_gated(pre, act, total, rows, in_rows, begin, INNER, alpha, beta, limit, INTERLEAVED, LIMITED)


@triton.jit
def _gate_backward(d, total, by, tensors, rows, in_rows, begin, INNER, gate, INTERLEAVED, LIMITED):
    """Compute ``gate_backward`` for a tile's gradient ``d``; return ``total`` plus each row's ``d * act``.

    Args:
        by: the rows' scale, or None.
        tensors: ``pre``, ``grad_pre`` and ``act``, from the tile's first row on.
        gate: alpha, beta and limit.
    """
    BN: tl.constexpr = d.shape[1]
    if BN > 16:  # values of so few columns fit into the registers beside the tile
        halves = columns_halved(d)
        for half in tl.static_range(2):
            at = begin + half * (BN // 2)
            total = _gate_backward(
                halves[half], total, by, tensors, rows, in_rows, at, INNER, gate, INTERLEAVED, LIMITED
            )
    else:
        pre, grad_pre, act = tensors
        alpha, beta, limit = gate
        # Round as the GEMM alone would store it, so that both ways give the same bits.
        d = d.to(act.dtype.element_ty).to(tl.float32)
        g, u = load_halves(pre, rows, in_rows, begin, INNER, INTERLEAVED, BN)
        out = activation(g, u, alpha, beta, limit, LIMITED)
        if by is not None:
            total += sum_columns(d * out)
            d, out = d * by, out * by
        store_rows(act, out, rows, in_rows, begin, INNER)
        d_gate, d_up = gate_gradients(d, g, u, alpha, beta, limit, LIMITED)
        store_halves(grad_pre, d_gate, d_up, rows, in_rows, begin, INNER, INTERLEAVED)
    return total


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["index"])
def grouped_mm_gate_backward(
    grad,
    index,
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
    alpha,
    beta,
    limit,
    INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Multiply ``grad`` ``(R, K)`` by ``b`` ``(e, K, INNER)``, and apply ``gate_backward`` to the product.

    Each block of columns stores its part of the gradient of ``scale`` in a row of ``parts``.
    """
    expert, first, rows, in_rows, block = _tile(expert_of, first_of, end_of, INNER, BM, BN)
    if expert < EXPERTS:
        begin = block * BN
        columns = begin + tl.arange(0, BN)
        own, in_columns, d = b + expert * se, columns < INNER, tl.full((BM, BN), 0.0, tl.float32)
        d = _product(grad, index, first, rows, in_rows, own, columns, in_columns, K, sk, sn, d, BK, EVEN_K)
        by = None
        if scale is not None:
            by = tl.load(scale + first + rows, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        tensors = pre + first * 2 * INNER, grad_pre + first * 2 * INNER, act + first * INNER
        total = tl.full((BM,), 0.0, tl.float32)
        gate = alpha, beta, limit
        total = _gate_backward(d, total, by, tensors, rows, in_rows, begin, INNER, gate, INTERLEAVED, LIMITED)
        if scale is not None:
            tl.store(parts + block.to(tl.int64) * R + first + rows, total, mask=in_rows)


@triton.jit(do_not_specialize_on_alignment=["a_index", "b_index"])
def grouped_outer(a, a_index, b, b_index, out, ends, M, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Compute ``a.T @ b`` of each expert's rows of ``a`` ``(R, M)`` and ``b`` ``(R, N)``; zero without rows."""
    columns = (N + BN - 1) // BN
    blocks = (M + BM - 1) // BM * columns
    expert, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    ms, ns = block // columns * BM + tl.arange(0, BM), block % columns * BN + tl.arange(0, BN)
    begin, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    rows = tl.arange(0, BK)
    a_at = a + begin.to(tl.int64) * M + rows[None, :] * M + ms[:, None]
    b_at = b + begin.to(tl.int64) * N + rows[:, None] * N + ns[None, :]
    total = tl.full((BM, BN), 0.0, tl.float32)
    for row in range(begin, end, BK):
        in_rows = rows < end - row
        if a_index is not None:
            sources = tl.load(a_index + row + rows, mask=in_rows, other=0).to(tl.int64)
            a_at = a + (sources * M)[None, :] + ms[:, None]
        if b_index is not None:
            sources = tl.load(b_index + row + rows, mask=in_rows, other=0).to(tl.int64)
            b_at = b + (sources * N)[:, None] + ns[None, :]
        a_tile = tl.load(a_at, mask=in_rows[None, :] & (ms < M)[:, None], other=0.0)
        b_tile = tl.load(b_at, mask=in_rows[:, None] & (ns < N)[None, :], other=0.0)
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
        a_at += BK * M
        b_at += BK * N
    at = out + expert.to(tl.int64) * M * N + ms[:, None] * N + ns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(ms < M)[:, None] & (ns < N)[None, :])
