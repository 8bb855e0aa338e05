"""Persistent grouped GEMMs of rows by matrices for sm_90 and sm_100, with loads by tensor descriptors (TMA).

A program computes several tiles, and loads the first operands of the next tile while it stores the last one. For that
``flatten`` merges the loop over tiles with the loop along ``k``. With ``SPECIALIZED`` some warps load and issue
products, others finish tiles. Rows of an index come by TMA's gather with ``GATHERS``, else by asynchronous copies.
Matrices always come by TMA.

Tiles and the order of every sum equal those of ``triton_gemms.py``, so results have the same bits. A tile with fewer
rows than ``BM`` also loads the rows after them, and does not store them. There is no bias, because a sum that starts
with one keeps the compiler from merging the loops.
"""

import triton
import triton.language as tl

from .triton_gemms import store_gated
from .triton_rows import store_rows

__all__ = ["grouped_mm", "grouped_mm_gate"]


@triton.jit
def _tile(number, blocks, expert_of, first_of, end_of, BN: tl.constexpr):
    """Return a tile's expert, first row, the end of the expert's rows, and first column."""
    tile = number // blocks
    return tl.load(expert_of + tile), tl.load(first_of + tile), tl.load(end_of + tile), number % blocks * BN


@triton.jit
def _matrix_tile(b, expert, begin, k, K_INNERMOST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    if K_INNERMOST:
        tile = tl.permute(tl.reshape(b.load([expert, begin, k]), (BN, BK)), (1, 0))
    else:
        tile = tl.reshape(b.load([expert, k, begin]), (BK, BN))
    return tile


@triton.jit
def _rows_of(a, index, first, end, rows, K, GATHERS: tl.constexpr):
    """Return the ``sources`` of ``_row_tile``: indexed rows of ``a`` or pointers to them, else the first row."""
    sources = first
    if index is not None:
        sources = tl.load(index + first + rows, mask=rows < end - first, other=0)
        sources = sources.to(tl.int32) if GATHERS else a + (sources.to(tl.int64) * K)[:, None]
    return sources


@triton.jit
def _row_tile(a, index, sources, k, K, GATHERS: tl.constexpr, EVEN_K: tl.constexpr, BK: tl.constexpr):
    if GATHERS:
        tile = a.gather(sources, k)
    elif index is not None:
        ks = k + tl.arange(0, BK)
        if EVEN_K:
            tile = tl.load(sources + ks[None, :])
        else:
            tile = tl.load(sources + ks[None, :], mask=(ks < K)[None, :], other=0.0)
    else:
        tile = a.load([sources, k])
    return tile


@triton.jit(do_not_specialize_on_alignment=["index", "order"])
def grouped_mm(
    a,
    index,
    b,
    out,
    order,
    expert_of,
    first_of,
    end_of,
    tile_ends,
    EXPERTS,
    N,
    K,
    GATHERS: tl.constexpr,
    K_INNERMOST: tl.constexpr,
    SPECIALIZED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Compute ``grouped_mm`` without a bias; ``b`` describes ``(e, N, K)`` if ``K_INNERMOST``, else ``(e, K, N)``."""
    blocks, rows = (N + BN - 1) // BN, tl.arange(0, BM)
    tiles = tl.load(tile_ends + EXPERTS - 1)
    for number in tl.range(
        tl.program_id(0), tiles * blocks, tl.num_programs(0), flatten=True, warp_specialize=SPECIALIZED
    ):
        expert, first, end, begin = _tile(number, blocks, expert_of, first_of, end_of, BN)
        sources = _rows_of(a, index, first, end, rows, K, GATHERS)
        total = tl.full((BM, BN), 0.0, tl.float32)
        for k in range(0, K, BK):
            a_tile = _row_tile(a, index, sources, k, K, GATHERS, EVEN_K, BK)
            b_tile = _matrix_tile(b, expert, begin, k, K_INNERMOST, BN, BK)
            total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
        if order is not None:
            to = tl.load(order + first + rows, mask=rows < end - first, other=0).to(tl.int64)
            store_rows(out, total, to, rows < end - first, begin, N)
        else:
            store_rows(out + first.to(tl.int64) * N, total, rows, rows < end - first, begin, N)


@triton.jit(do_not_specialize_on_alignment=["index"])
def grouped_mm_gate(
    a,
    index,
    b,
    pre,
    act,
    expert_of,
    first_of,
    end_of,
    tile_ends,
    EXPERTS,
    INNER,
    K,
    alpha,
    beta,
    limit,
    GATHERS: tl.constexpr,
    SPECIALIZED: tl.constexpr,
    LIMITED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Compute ``grouped_mm_gate`` for gates above ups; ``b`` describes ``(e, 2, INNER, K)``, so one load gets both."""
    blocks, rows = (INNER + BN - 1) // BN, tl.arange(0, BM)
    tiles = tl.load(tile_ends + EXPERTS - 1)
    for number in tl.range(
        tl.program_id(0), tiles * blocks, tl.num_programs(0), flatten=True, warp_specialize=SPECIALIZED
    ):
        expert, first, end, begin = _tile(number, blocks, expert_of, first_of, end_of, BN)
        sources = _rows_of(a, index, first, end, rows, K, GATHERS)
        total = tl.full((BM, 2 * BN), 0.0, tl.float32)
        for k in range(0, K, BK):
            a_tile = _row_tile(a, index, sources, k, K, GATHERS, EVEN_K, BK)
            b_tile = tl.permute(tl.reshape(b.load([expert, 0, begin, k]), (2 * BN, BK)), (1, 0))
            total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
        own_pre, own_act = pre + first.to(tl.int64) * 2 * INNER, act + first.to(tl.int64) * INNER
        in_rows = rows < end - first
        store_gated(own_pre, own_act, total, rows, in_rows, begin, INNER, alpha, beta, limit, False, LIMITED)
