"""``tiles.py`` on a GPU: forward reads a tile of logits once, and backward overwrites it with its gradient.

Torch's operators read a tile in float32 five times in forward and six times in backward.
"""

import triton
import triton.language as tl

from ..moe.gemm.triton_rows import add

__all__ = ["gradient_of", "reduce_tile"]

_REDUCED, _WRITTEN = 4096, 2048  # columns that a program has in registers at a time


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


# The number of tokens differs between micro-batches.
@triton.jit(do_not_specialize=["TOKENS"])
def reduce_rows(logits, scale, labels, sums, COLUMNS, TOKENS, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Add a row of the tile to its four sums, which are ``TOKENS`` apart."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * COLUMNS
    sums += row
    by, label = tl.load(scale + row), tl.load(labels + row)
    most, total, weighted = tl.load(sums), tl.load(sums + TOKENS), tl.load(sums + 2 * TOKENS)
    for first in range(0, COLUMNS, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = tl.load(logits + at, mask=at < COLUMNS, other=-float("inf")).to(tl.float32) * by
        larger = tl.maximum(most, tl.reduce(z, 0, _larger))
        z, less = z - larger, most - larger
        e, factor = tl.exp(z), tl.exp(less)
        if WITH_ENTROPY:  # columns past the end add nothing
            weighted = factor * (weighted + less * total) + tl.reduce(tl.where(e > 0.0, e * z, 0.0), 0, add)
        total = factor * total + tl.reduce(e, 0, add)
        most = larger
    tl.store(sums, most)
    tl.store(sums + TOKENS, total)
    tl.store(sums + 2 * TOKENS, weighted)
    inside = (label >= 0) & (label < COLUMNS)
    own = tl.load(logits + label, mask=inside, other=0.0).to(tl.float32) * by
    tl.store(sums + 3 * TOKENS, own, mask=inside)


@triton.jit
def write_gradients(
    logits, scale, labels, lse, common, of_entropy, of_label, COLUMNS, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row.to(tl.int64) * COLUMNS + at
    z = tl.load(logits, mask=at < COLUMNS, other=0.0).to(tl.float32) * tl.load(scale + row) - tl.load(lse + row)
    p, factor = tl.exp(z), tl.load(common + row)
    if WITH_ENTROPY:
        factor = tl.load(of_entropy + row) * z + factor
    gradient = p * factor + tl.where(at == tl.load(labels + row), tl.load(of_label + row), 0.0)
    tl.store(logits, gradient.to(logits.dtype.element_ty), mask=at < COLUMNS)


def reduce_tile(logits, scale, labels, sums, with_entropy):
    """``tiles.reduce_tile`` for contiguous logits."""
    rows, columns = logits.shape
    block = min(_REDUCED, triton.next_power_of_2(columns))
    arguments = logits, scale, labels, sums, columns, sums.stride(0)
    reduce_rows[(rows,)](*arguments, WITH_ENTROPY=with_entropy, BLOCK=block, num_warps=8)


def gradient_of(logits, scale, labels, lse, common, of_entropy, of_label):
    """``tiles.gradient_of`` for contiguous logits, which it overwrites."""
    rows, columns = logits.shape
    block, has_entropy = min(_WRITTEN, triton.next_power_of_2(columns)), of_entropy is not None
    of_rows = logits, scale, labels, lse, common, of_entropy if has_entropy else common, of_label
    write_gradients[(rows, triton.cdiv(columns, block))](*of_rows, columns, WITH_ENTROPY=has_entropy, BLOCK=block)
    return logits
