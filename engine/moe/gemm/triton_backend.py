"""The experts' operators in Triton; tests compare them with ``backends.TorchBackend``.

No kernel uses atomics, so results are deterministic; nothing waits for the device, but for the first launch of a GEMM,
which measures a few tiles. These have the same bits, but for the gradient of ``scale_R`` in ``mm_gate_backward``, where
torch's deterministic algorithms leave no choice. GEMMs accumulate in float32. With ``TRITON_INTERPRET=1``, set before
this file is imported, the kernels run on a CPU, for tests.
"""

import torch
import triton

from . import persistent_launch, triton_gemms, triton_rows
from .backends import MOST_BY_INDEX, IndexedRows, Rows
from .gate import gate_of
from .triton_tiles import INTERPRETED, gate_backward_tiles, gate_tiles, launch_fastest, mm_tiles, outer_tiles, tiles_of

__all__ = ["TritonBackend"]

_TAKEN = (4, 16) if INTERPRETED else (8, 256)  # rows and columns that one program copies
_WIDEST = 16 if INTERPRETED else 1024  # columns of a row that one program sums
_ROWS, _COLUMNS = (4, 16) if INTERPRETED else (4, 256)  # of an activation that one program computes at a time
_TWO_PASSES = "two passes"  # a GEMM and the gate's backward, beside the tiles of the kernel that is both
_SEGMENT = 16 if INTERPRETED else 128  # rows that one program sums


class TritonBackend:
    """Launches the kernels of ``triton_rows.py`` and ``triton_gemms.py``."""

    name = "triton"
    reads_index = True

    def indexed(self, x, index_R):
        return IndexedRows(x, index_R)

    def take(self, x_TD, tokens_S):
        x_TD, width = x_TD.contiguous(), x_TD.shape[1]
        out = x_TD.new_empty(tokens_S.shape[0], width)
        rows, block = out.shape[0], min(triton.next_power_of_2(width), _TAKEN[1])
        if out.numel():
            grid = (triton.cdiv(rows, _TAKEN[0]), triton.cdiv(width, block))
            triton_rows.take[grid](x_TD, tokens_S, out, rows, width, ROWS=_TAKEN[0], BLOCK=block)
        return out

    def gather_sum(self, rows_SD, slots_TK, weights_TK, dtype):
        (tokens, k), width = slots_TK.shape, rows_SD.shape[1]
        out = rows_SD.new_empty(tokens, width, dtype=dtype)
        block = min(triton.next_power_of_2(width), _WIDEST)
        weighted = weights_TK is not None
        if out.numel():
            weights = weights_TK.contiguous() if weighted else rows_SD
            triton_rows.gather_sum[(tokens, triton.cdiv(width, block))](
                rows_SD.contiguous(), slots_TK.contiguous(), weights, out, width, K=k, WEIGHTED=weighted, BLOCK=block
            )
        return out

    def mm(self, rows, in_out, groups, bias=None, order_R=None):
        (experts, k, n), (rows, index, has_index) = in_out.shape, _operand(rows)
        out = rows.new_empty(groups.rows, n)
        bias = None if bias is None else bias.contiguous()

        def launch(tile):
            if tile.is_persistent:
                return persistent_launch.mm(tile, rows, index, has_index, in_out, out, order_R, groups)
            tiles = tiles_of(groups, tile.m)
            triton_gemms.grouped_mm[(len(tiles.expert) * triton.cdiv(n, tile.n),)](
                rows,
                index,
                in_out,
                in_out if bias is None else bias,
                out,
                out if order_R is None else order_R,
                *tiles.table,
                experts,
                n,
                k,
                *in_out.stride(),
                HAS_INDEX=has_index,
                HAS_BIAS=bias is not None,
                HAS_ORDER=order_R is not None,
                EVEN_K=k % tile.k == 0,
                **tile.constants(rows.dtype),
            )

        if out.numel():
            persistent, is_scattered = persistent_launch.takes(rows, in_out, bias), order_R is not None
            key = (rows.dtype, k, n, in_out.stride(2) == 1, bias is not None, has_index, is_scattered, persistent)
            launch_fastest("mm", key, mm_tiles(rows.dtype, n, k, persistent), groups, launch, (out,))
        return out

    def outer(self, a, b, groups):
        m, n = _width(a), _width(b)
        a, b = self._to_be_read(a, n), self._to_be_read(b, m)
        (a, a_index, a_indexed), (b, b_index, b_indexed) = _operand(a), _operand(b)
        experts = groups.counts_e.shape[0]
        out = a.new_empty(experts, m, n)
        if not groups.rows:
            return out.zero_()

        def launch(tile):
            grid = (experts * triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)
            indexed = {"A_INDEXED": a_indexed, "B_INDEXED": b_indexed}
            operands = a, a_index, b, b_index
            triton_gemms.grouped_outer[grid](
                *operands, out, groups.offsets_e, m, n, **indexed, **tile.constants(a.dtype)
            )

        choices = outer_tiles(a.dtype, m, n, a_indexed or b_indexed)
        launch_fastest("outer", (a.dtype, m, n, a_indexed, b_indexed), choices, groups, launch, (out,))
        return out

    def _to_be_read(self, rows, columns):
        """Copy rows of an index, where many blocks of the other operand's columns would have them read through it."""
        if isinstance(rows, IndexedRows) and columns > MOST_BY_INDEX:
            return self.take(rows.x, rows.index_R)
        return rows

    def segment_sum(self, rows, groups, scale_R=None):
        rows, index, has_index = _operand(rows)
        experts, width = groups.counts_e.shape[0], rows.shape[1]
        out = rows.new_empty(experts, width)
        if not groups.rows:
            return out.zero_()
        # First within each tile of rows, so that an expert with many rows takes no longer; then over its tiles.
        tiles = tiles_of(groups, _SEGMENT)
        parts = rows.new_empty(len(tiles.expert), width, dtype=torch.float32)
        scale = rows if scale_R is None else scale_R.contiguous()
        sizes = {"AT_MOST": _SEGMENT, "ROWS": 16, "BLOCK": min(128, triton.next_power_of_2(width))}
        blocks = triton.cdiv(width, sizes["BLOCK"])
        first = {"HAS_INDEX": has_index, "SCALED": scale_R is not None}
        triton_rows.sum_rows[(blocks, len(parts))](
            rows, index, scale, parts, tiles.first, tiles.end, width, **first, **sizes
        )
        sizes |= {"AT_MOST": len(parts), "HAS_INDEX": False, "SCALED": False}
        of_experts = tiles.first_of_expert, tiles.end_of_expert
        triton_rows.sum_rows[(blocks, experts)](parts, parts, parts, out, *of_experts, width, **sizes)
        return out

    def row_dot(self, rows, vectors, groups):
        (experts, width), (rows, index, has_index) = vectors.shape, _operand(rows)
        out = rows.new_empty(groups.rows, dtype=torch.float32)
        if groups.rows:
            tiles = tiles_of(groups, _SEGMENT)
            triton_rows.row_dot[(_SEGMENT // 16, len(tiles.expert))](
                rows,
                index,
                vectors.contiguous(),
                out,
                *tiles.table,
                experts,
                width,
                HAS_INDEX=has_index,
                ROWS=16,
                BLOCK=min(128, triton.next_power_of_2(width)),
            )
        return out

    def gate(self, module):
        return gate_of(module)

    def activate(self, pre, gate):
        rows, inner = pre.shape[0], pre.shape[1] // 2
        act, block = pre.new_empty(rows, inner), min(triton.next_power_of_2(inner), _COLUMNS)
        if act.numel():
            grid = (triton.cdiv(rows, _ROWS), triton.cdiv(inner, block))
            triton_rows.gate[grid](pre, act, rows, inner, *gate[:3], **gate.constants(), ROWS=_ROWS, BLOCK=block)
        return act

    def activate_backward(self, pre, grad, scale_R, gate):
        rows, inner = grad.shape
        grad, grad_pre, block = grad.contiguous(), torch.empty_like(pre), min(triton.next_power_of_2(inner), _COLUMNS)
        grad_scale = None if scale_R is None else pre.new_empty(rows, dtype=torch.float32)
        if grad.numel():
            triton_rows.gate_backward[(triton.cdiv(rows, _ROWS),)](
                pre,
                grad,
                pre if scale_R is None else scale_R.contiguous(),
                grad_pre,
                grad,  # each block's activation takes the place of its gradient
                pre if grad_scale is None else grad_scale,
                rows,
                inner,
                *gate[:3],
                **gate.constants(),
                SCALED=scale_R is not None,
                ROWS=_ROWS,
                BLOCK=block,
            )
        return grad_pre, grad, grad_scale

    def mm_gate_backward(self, grad, in_out, groups, pre, scale_R, gate):
        (experts, k, inner), (rows, index, has_index) = in_out.shape, _operand(grad)
        scale = pre if scale_R is None else scale_R.contiguous()
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
            triton_gemms.grouped_mm_gate_backward[(len(tiles.expert) * blocks,)](
                rows,
                index,
                in_out,
                pre,
                scale,
                *results,
                parts,
                *tiles.table,
                experts,
                inner,
                k,
                groups.rows,
                *in_out.stride(),
                *gate[:3],
                HAS_INDEX=has_index,
                SCALED=scale_R is not None,
                **gate.constants(),
                EVEN_K=k % tile.k == 0,
                **tile.constants(pre.dtype),
            )
            grad_scale = None if scale_R is None else parts.sum(0)

        # Both ways sum the gradient of scale_R, in different orders: times must not choose where runs have to be equal.
        is_fixed = torch.are_deterministic_algorithms_enabled()
        measured = () if is_fixed else gate_backward_tiles(pre.dtype, inner, k)
        layout = in_out.stride(2) == 1, gate.is_interleaved, has_index, scale_R is not None
        key = (pre.dtype, k, inner, *layout, is_fixed)
        launch_fastest("mm and gate's backward", key, (_TWO_PASSES, *measured), groups, launch, results)
        return *results, grad_scale

    def up_gate(self, rows, in_out, groups, bias, gate):
        (experts, k, n), (rows, index, has_index) = in_out.shape, _operand(rows)
        inner = n // 2
        pre, act = rows.new_empty(groups.rows, n), rows.new_empty(groups.rows, inner)
        bias = None if bias is None else bias.contiguous()

        def launch(tile):
            if tile.is_persistent:
                return persistent_launch.up_gate(tile, rows, index, has_index, in_out, (pre, act), groups, gate)
            tiles = tiles_of(groups, tile.m)
            triton_gemms.grouped_mm_gate[(len(tiles.expert) * triton.cdiv(inner, tile.n),)](
                rows,
                index,
                in_out,
                in_out if bias is None else bias,
                pre,
                act,
                *tiles.table,
                experts,
                inner,
                k,
                *in_out.stride(),
                *gate[:3],
                HAS_INDEX=has_index,
                HAS_BIAS=bias is not None,
                **gate.constants(),
                EVEN_K=k % tile.k == 0,
                **tile.constants(rows.dtype),
            )

        if act.numel():
            persistent = not gate.is_interleaved and persistent_launch.takes(rows, in_out, bias, gates=2)
            key = (rows.dtype, k, inner, in_out.stride(2) == 1, bias is not None, gate.is_interleaved, has_index)
            choices = gate_tiles(rows.dtype, k, persistent)
            launch_fastest("mm and gate", (*key, persistent), choices, groups, launch, (pre, act))
        return pre, act


def _width(rows: Rows) -> int:
    return (rows.x if isinstance(rows, IndexedRows) else rows).shape[1]


def _operand(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return what a kernel is handed: the tensor, the index, for which the tensor stands where there is none."""
    if isinstance(rows, IndexedRows):
        return rows.x.contiguous(), rows.index_R.contiguous(), True
    rows = rows.contiguous()
    return rows, rows, False
