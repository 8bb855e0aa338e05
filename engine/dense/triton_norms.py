"""The kernels of ``norms.py``: a program keeps some rows in registers, and reads them once.

No kernel uses atomics, and a row's result does not depend on the other rows.
"""

import torch
import triton
import triton.language as tl

from ..moe.gemm.triton_rows import add, sum_columns

__all__ = ["backward", "forward"]

_VALUES = 4096  # values that a program has in registers at a time, unless one row is wider
_PROGRAMS = 512  # programs of backward; each sums a part of the weight's gradient


@triton.jit
def _load(x, rows, columns, stride, R, N):
    mask = (rows < R)[:, None] & (columns < N)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)


# The number of rows differs between micro-batches.
@triton.jit(do_not_specialize=["R"])
def norm_rows(
    x,
    weight,
    out,
    scale,
    R,
    N,
    stride,
    eps,
    offset,
    ROUNDS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store normalised rows, and each row's factor."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    values = _load(x, rows, columns, stride, R, N)
    by = 1.0 / tl.sqrt(sum_columns(values * values) / N + eps)
    values = values * by[:, None]
    if ROUNDS_FIRST:
        values = values.to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32) + offset
    mask = (rows < R)[:, None] & (columns < N)[None, :]
    to = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(to, (values * factor[None, :]).to(out.dtype.element_ty), mask=mask)
    tl.store(scale + rows, by, mask=rows < R)


@triton.jit(do_not_specialize=["R"])
def norm_rows_backward(
    grad,
    x,
    weight,
    scale,
    grad_x,
    grad_weight,
    R,
    N,
    grad_stride,
    stride,
    offset,
    ROUNDS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the rows' gradients, and for each program a sum of the weight's gradient."""
    columns = tl.arange(0, BLOCK)
    factor = tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32) + offset
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        by = tl.load(scale + rows, mask=rows < R, other=0.0)[:, None]
        values, grads = _load(x, rows, columns, stride, R, N) * by, _load(grad, rows, columns, grad_stride, R, N)
        multiplied = values
        if ROUNDS_FIRST:
            multiplied = values.to(grad_x.dtype.element_ty).to(tl.float32)
        total += tl.reduce(grads * multiplied, 0, add)
        grads = grads * factor[None, :]
        along = sum_columns(grads * values) / N
        mask = (rows < R)[:, None] & (columns < N)[None, :]
        to = grad_x + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(to, (by * (grads - values * along[:, None])).to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_weight + tl.program_id(0) * N + columns, total, mask=columns < N)


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, rounds_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised rows of ``[..., N]``, contiguous, and each row's factor, float32 ``[R]``."""
    rows, out = _rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    if out.numel():
        sizes, settings = _sizes(rows)
        grid = (triton.cdiv(len(rows), settings["ROWS"]),)
        norm_rows[grid](
            rows, weight, out, scale, *sizes, rows.stride(0), eps, offset, ROUNDS_FIRST=rounds_first, **settings
        )
    return out, scale


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offset: float, rounds_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x`` and ``weight``."""
    rows, grads = _rows(x), _rows(grad)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not grad_x.numel():
        return grad_x, torch.zeros_like(weight)
    sizes, settings = _sizes(rows)
    programs = min(_PROGRAMS, triton.cdiv(len(rows), settings["ROWS"]))
    parts = torch.empty(programs, rows.shape[1], dtype=torch.float32, device=x.device)
    strides = grads.stride(0), rows.stride(0)
    norm_rows_backward[(programs,)](
        grads, rows, weight, scale, grad_x, parts, *sizes, *strides, offset, ROUNDS_FIRST=rounds_first, **settings
    )
    return grad_x, parts.sum(0).to(weight.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """View ``[..., N]`` as ``[R, N]`` with contiguous rows, or copy it."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _sizes(rows: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    block = triton.next_power_of_2(rows.shape[1])
    warps = 8 if block <= _VALUES else 16
    return (len(rows), rows.shape[1]), {"ROWS": max(1, _VALUES // block), "BLOCK": block, "num_warps": warps}
