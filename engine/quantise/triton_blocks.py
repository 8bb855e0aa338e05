"""Triton kernels of ``blocks.py``: each program keeps one block in registers and reads it once."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .blocks import FP8, LEAST

__all__ = ["block_maxima", "quantise", "round_in_place"]

_WARPS = 8  # 64 values per thread, for a block of 128 x 128


# Use only builtins of Triton's language, as in ``engine/moe/gemm/triton_rows.py``.
@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _largest(values):
    return tl.reduce(tl.reduce(tl.abs(values), 1, _larger), 0, _larger)


@triton.jit
def _pointers(matrices, top, left, stride, row_stride, column_stride, BLOCK: tl.constexpr):
    """Return pointers to this program's block; some lie before the shard if the shard begins inside the block."""
    row, column = tl.program_id(1) * BLOCK - top, tl.program_id(0) * BLOCK - left
    start = tl.program_id(2).to(tl.int64) * stride
    corner = matrices + start + row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    along = tl.arange(0, BLOCK)
    return corner + (along[:, None] * row_stride + along[None, :] * column_stride)


@triton.jit
def _is_inside(rows, columns, top, left, BLOCK: tl.constexpr):
    row = tl.program_id(1) * BLOCK - top + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK - left + tl.arange(0, BLOCK)
    return ((row >= 0) & (row < rows))[:, None] & ((column >= 0) & (column < columns))[None, :]


@triton.jit
def _load(values, rows, columns, top, left, stride, row_stride, column_stride, BLOCK: tl.constexpr):
    at = _pointers(values, top, left, stride, row_stride, column_stride, BLOCK)
    found = tl.load(at, mask=_is_inside(rows, columns, top, left, BLOCK), other=0.0)
    return found.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _number():
    """Return the index of this program's block in a contiguous tensor of blocks."""
    row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return row * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def maxima_of_blocks(values, maxima, rows, columns, top, left, stride, row_stride, column_stride, BLOCK: tl.constexpr):
    block = _load(values, rows, columns, top, left, stride, row_stride, column_stride, BLOCK)
    tl.store(maxima + _number(), _largest(block))


@triton.jit
def quantise_blocks(
    values,
    inverse,
    out,
    rows,
    columns,
    top,
    left,
    stride,
    row_stride,
    column_stride,
    out_stride,
    out_row_stride,
    BLOCK: tl.constexpr,
):
    block = _load(values, rows, columns, top, left, stride, row_stride, column_stride, BLOCK)
    scaled = block * tl.load(inverse + _number())
    at = _pointers(out, top, left, out_stride, out_row_stride, 1, BLOCK)
    tl.store(at, scaled.to(out.dtype.element_ty), mask=_is_inside(rows, columns, top, left, BLOCK))


@triton.jit
def round_blocks(
    values,
    rows,
    columns,
    stride,
    row_stride,
    column_stride,
    LEAST: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = _load(values, rows, columns, 0, 0, stride, row_stride, column_stride, BLOCK)
    # torch on a GPU divides by a scalar as a product with its inverse, so this matches ``Blocks.scales`` in bits.
    # ``/`` is approximate in Triton; div_rn rounds to nearest.
    scale = tl.maximum(_largest(block), LEAST) * INVERSE
    rounded = (block * tl.div_rn(1.0, scale)).to(tl.float8e4nv).to(tl.float32) * scale
    at = _pointers(values, 0, 0, stride, row_stride, column_stride, BLOCK)
    tl.store(at, rounded.to(values.dtype.element_ty), mask=_is_inside(rows, columns, 0, 0, BLOCK))


def block_maxima(values: torch.Tensor, first: Sequence[int], block: int) -> torch.Tensor:
    """See ``Blocks.maxima``; ``first`` is the index of the first row and column in the weight."""
    matrices, top, left = _matrices(values), *(i % block for i in first)
    grid = _grid(matrices, top, left, block)
    found = torch.empty(*grid[::-1], dtype=torch.float32, device=values.device)
    shape = matrices.shape[1:]
    maxima_of_blocks[grid](matrices, found, *shape, top, left, *matrices.stride(), BLOCK=block, num_warps=_WARPS)
    return found.view(*values.shape[:-2], *found.shape[-2:])


def quantise(values: torch.Tensor, scales: torch.Tensor, first: Sequence[int], block: int, into: torch.Tensor) -> None:
    """See ``Blocks.quantise``; the rows of ``into`` must be contiguous."""
    matrices, out, top, left = _matrices(values), _matrices(into), *(i % block for i in first)
    assert out.stride(2) == 1, "rows of FP8 values are contiguous"
    grid, shape = _grid(matrices, top, left, block), matrices.shape[1:]
    inverse = (1.0 / scales).contiguous()
    strides = *matrices.stride(), *out.stride()[:2]
    quantise_blocks[grid](matrices, inverse, out, *shape, top, left, *strides, BLOCK=block, num_warps=_WARPS)


def round_in_place(values: torch.Tensor, block: int) -> None:
    """See ``Blocks.round_in_place``."""
    matrices = _matrices(values)
    grid = _grid(matrices, 0, 0, block)
    sizes = *matrices.shape[1:], *matrices.stride()
    round_blocks[grid](matrices, *sizes, LEAST=LEAST, INVERSE=1 / torch.finfo(FP8).max, BLOCK=block, num_warps=_WARPS)


def _matrices(values: torch.Tensor) -> torch.Tensor:
    """Return a view as ``[E, rows, columns]``; a matrix ``[rows, columns]`` has E = 1."""
    return values[None] if values.dim() == 2 else values


def _grid(matrices: torch.Tensor, top: int, left: int, block: int) -> tuple[int, int, int]:
    count, rows, columns = matrices.shape
    return -(-(left + columns) // block), -(-(top + rows) // block), count
