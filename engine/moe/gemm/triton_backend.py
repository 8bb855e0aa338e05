"""The experts' operators in Triton; tests compare them with ``backends.Backend``.

No kernel uses atomics, and nothing waits for the device except the first launch of a GEMM, which times a few tiles.
Tiles give the same bits, except for the gradient of ``scale_R`` in ``mm_gate_backward``; torch's deterministic
algorithms turn that choice off. GEMMs accumulate in float32. With ``TRITON_INTERPRET=1``, set before this file is
imported, the kernels run on a CPU, for tests.
"""

import torch
import triton

from . import persistent_launch, triton_gemms, triton_rows
from .backends import MOST_BY_INDEX, Backend, IndexedRows, Rows
from .triton_tiles import INTERPRETED, gate_backward_tiles, gate_tiles, launch_fastest, mm_tiles, outer_tiles, tiles_of

__all__ = ["TritonBackend"]

_TAKEN = (4, 16) if INTERPRETED else (8, 256)  # rows and columns that one program copies
_WIDEST = 16 if INTERPRETED else 1024  # columns of a row that one program sums
_ROWS, _COLUMNS = (4, 16) if INTERPRETED else (4, 256)  # of an activation that one program computes at a time
_TWO_PASSES = "two passes"  # a GEMM and the gate's backward, beside the tiles of the fused kernel
_SEGMENT = 16 if INTERPRETED else 128  # rows that one program sums


class TritonBackend(Backend):
    """Launches the kernels of ``triton_rows.py`` and ``triton_gemms.py``."""

    reads_index = True

    def indexed(self, x, index_R):
        return IndexedRows(x, index_R)

    def take(self, x_TD, tokens_S):
        x_TD, width = x_TD.contiguous(), x_TD.shape[1]
        out = x_TD.new_empty(tokens_S.shape[0], width)
        rows, block = out.shape[0], _block(width, _TAKEN[1])
        if out.numel():
            grid = (triton.cdiv(rows, _TAKEN[0]), triton.cdiv(width, block))
            triton_rows.take[grid](x_TD, tokens_S, out, rows, width, ROWS=_TAKEN[0], BLOCK=block)
        return out

    def gather_sum(self, rows_SD, slots_TK, weights_TK, dtype):
        (tokens, k), width = slots_TK.shape, rows_SD.shape[1]
        out, block = rows_SD.new_empty(tokens, width, dtype=dtype), _block(width, _WIDEST)
        if out.numel():
            triton_rows.gather_sum[(tokens, triton.cdiv(width, block))](
                rows_SD.contiguous(), slots_TK.contiguous(), _contiguous(weights_TK), out, width, K=k, BLOCK=block
            )
        return out

    def mm(self, rows, in_out, groups, bias=None, order_R=None):
        (experts, k, n), (rows, index) = in_out.shape, _operand(rows)
        out, bias = rows.new_empty(groups.rows, n), _contiguous(bias)

        def launch(tile):
            if tile.is_persistent:
                return persistent_launch.mm(tile, (rows, index, in_out), out, order_R, groups)
            tiles = tiles_of(groups, tile.m)
            sizes, constants = (experts, n, k, *in_out.stride()), tile.constants()
            triton_gemms.grouped_mm[(len(tiles.expert) * triton.cdiv(n, tile.n),)](
                rows, index, in_out, bias, out, order_R, *tiles.table, *sizes, EVEN_K=k % tile.k == 0, **constants
            )

        if out.numel():
            persistent, given = persistent_launch.takes(rows, in_out, bias), (bias, index, order_R)
            key = (rows.dtype, k, n, in_out.stride(2) == 1, *(x is not None for x in given), persistent)
            launch_fastest("mm", key, mm_tiles(rows.dtype, n, k, persistent), groups, launch, (out,))
        return out

    def outer(self, a, b, groups):
        m, n = _width(a), _width(b)
        a, b = self._copied_if_wide(a, n), self._copied_if_wide(b, m)
        (a, a_index), (b, b_index) = _operand(a), _operand(b)
        experts = groups.counts_e.shape[0]
        out = a.new_empty(experts, m, n)
        if not groups.rows:
            return out.zero_()

        def launch(tile):
            grid = (experts * triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)
            triton_gemms.grouped_outer[grid](a, a_index, b, b_index, out, groups.offsets_e, m, n, **tile.constants())

        indexed = a_index is not None, b_index is not None
        launch_fastest(
            "outer", (a.dtype, m, n, *indexed), outer_tiles(a.dtype, m, n, any(indexed)), groups, launch, (out,)
        )
        return out

    def _copied_if_wide(self, rows, columns):
        """Copy the rows of an index if many blocks of the other operand's columns would read them through it."""
        if isinstance(rows, IndexedRows) and columns > MOST_BY_INDEX:
            return self.take(rows.x, rows.index_R)
        return rows

    def segment_sum(self, rows, groups, scale_R=None):
        rows, index = _operand(rows)
        experts, width = groups.counts_e.shape[0], rows.shape[1]
        out = rows.new_empty(experts, width)
        if not groups.rows:
            return out.zero_()
        # First within each tile of rows, so that an expert with many rows takes no longer; then over its tiles.
        tiles = tiles_of(groups, _SEGMENT)
        parts = rows.new_empty(len(tiles.expert), width, dtype=torch.float32)
        sizes = {"ROWS": 16, "BLOCK": _block(width, 128)}
        blocks = triton.cdiv(width, sizes["BLOCK"])
        triton_rows.sum_rows[(blocks, len(parts))](
            rows, index, _contiguous(scale_R), parts, tiles.first, tiles.end, width, AT_MOST=_SEGMENT, **sizes
        )
        of_experts = tiles.first_of_expert, tiles.end_of_expert
        triton_rows.sum_rows[(blocks, experts)](parts, None, None, out, *of_experts, width, AT_MOST=len(parts), **sizes)
        return out

    def row_dot(self, rows, vectors, groups):
        (experts, width), (rows, index) = vectors.shape, _operand(rows)
        out = rows.new_empty(groups.rows, dtype=torch.float32)
        if groups.rows:
            tiles, sizes = tiles_of(groups, _SEGMENT), {"ROWS": 16, "BLOCK": _block(width, 128)}
            triton_rows.row_dot[(_SEGMENT // 16, len(tiles.expert))](
                rows, index, vectors.contiguous(), out, *tiles.table, experts, width, **sizes
            )
        return out

    def activate(self, pre, gate):
        rows, inner = pre.shape[0], pre.shape[1] // 2
        act, block = pre.new_empty(rows, inner), _block(inner, _COLUMNS)
        if act.numel():
            grid = (triton.cdiv(rows, _ROWS), triton.cdiv(inner, block))
            triton_rows.gate[grid](pre, act, rows, inner, *gate[:3], **gate.constants(), ROWS=_ROWS, BLOCK=block)
        return act

    def activate_backward(self, pre, grad, scale_R, gate):
        rows, inner = grad.shape
        grad, grad_pre = grad.contiguous(), torch.empty_like(pre)
        grad_scale = None if scale_R is None else pre.new_empty(rows, dtype=torch.float32)
        if grad.numel():
            # The activation overwrites its gradient.
            operands = pre, grad, _contiguous(scale_R), grad_pre, grad, grad_scale
            sizes = {"ROWS": _ROWS, "BLOCK": _block(inner, _COLUMNS)}
            triton_rows.gate_backward[(triton.cdiv(rows, _ROWS),)](
                *operands, rows, inner, *gate[:3], **gate.constants(), **sizes
            )
        return grad_pre, grad, grad_scale

    def mm_gate_backward(self, grad, in_out, groups, pre, scale_R, gate):
        (experts, k, inner), (rows, index), scale = in_out.shape, _operand(grad), _contiguous(scale_R)
        grad_scale, results = None, list[torch.Tensor]()

        def launch(tile):
            nonlocal grad_scale
            results.clear()  # two launches' results would take twice the memory
            if tile == _TWO_PASSES:
                grad_pre, act, grad_scale = self.activate_backward(pre, self.mm(grad, in_out, groups), scale_R, gate)
                results[:] = grad_pre, act
                return
            tiles, blocks = tiles_of(groups, tile.m), triton.cdiv(inner, tile.n)
            results[:] = torch.empty_like(pre), pre.new_empty(groups.rows, inner)
            parts = pre.new_empty(blocks, groups.rows, dtype=torch.float32)
            operands = rows, index, in_out, pre, scale, *results, parts
            sizes, constants = (experts, inner, k, groups.rows, *in_out.stride()), tile.constants()
            triton_gemms.grouped_mm_gate_backward[(len(tiles.expert) * blocks,)](
                *operands, *tiles.table, *sizes, *gate[:3], **gate.constants(), EVEN_K=k % tile.k == 0, **constants
            )
            grad_scale = None if scale_R is None else parts.sum(0)

        # The two ways sum the gradient of scale_R in different orders: times must not choose if runs have to be equal.
        is_fixed = torch.are_deterministic_algorithms_enabled()
        measured = () if is_fixed else gate_backward_tiles(pre.dtype, inner, k)
        layout = in_out.stride(2) == 1, gate.is_interleaved, index is not None, scale_R is not None
        key = (pre.dtype, k, inner, *layout, is_fixed)
        launch_fastest("mm and gate's backward", key, (_TWO_PASSES, *measured), groups, launch, results)
        return *results, grad_scale

    def up_gate(self, rows, in_out, groups, bias, gate):
        (experts, k, n), (rows, index), bias = in_out.shape, _operand(rows), _contiguous(bias)
        inner = n // 2
        pre, act = rows.new_empty(groups.rows, n), rows.new_empty(groups.rows, inner)

        def launch(tile):
            if tile.is_persistent:
                return persistent_launch.up_gate(tile, (rows, index, in_out), (pre, act), groups, gate)
            tiles, operands = tiles_of(groups, tile.m), (rows, index, in_out, bias, pre, act)
            sizes, constants = (experts, inner, k, *in_out.stride()), tile.constants()
            triton_gemms.grouped_mm_gate[(len(tiles.expert) * triton.cdiv(inner, tile.n),)](
                *operands, *tiles.table, *sizes, *gate[:3], **gate.constants(), EVEN_K=k % tile.k == 0, **constants
            )

        if act.numel():
            persistent = not gate.is_interleaved and persistent_launch.takes(rows, in_out, bias, gates=2)
            layout = in_out.stride(2) == 1, bias is not None, gate.is_interleaved, index is not None
            key = (rows.dtype, k, inner, *layout, persistent)
            launch_fastest("mm and gate", key, gate_tiles(rows.dtype, k, persistent), groups, launch, (pre, act))
        return pre, act


def _block(width: int, most: int) -> int:
    """Return the columns of a program: a power of two."""
    return min(most, triton.next_power_of_2(width))


def _width(rows: Rows) -> int:
    return (rows.x if isinstance(rows, IndexedRows) else rows).shape[1]


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def _operand(rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a kernel's arguments for rows: tensor and index."""
    if isinstance(rows, IndexedRows):
        return rows.x.contiguous(), rows.index_R.contiguous()
    return rows.contiguous(), None
