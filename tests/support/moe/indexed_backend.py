"""Operators in torch that allocate as much as the Triton kernels, which a CPU only interprets.

They read rows through an index, store them in an order, and fuse the activation. Temporaries have a few rows.
"""

import os
from collections.abc import Iterator

import torch

from epfsdp2.engine.moe import forward
from epfsdp2.engine.moe.gemm.backends import Backend, Groups, IndexedRows, Rows

__all__ = ["IndexedBackend", "stand_in"]

_ROWS = 32


class IndexedBackend(Backend):
    name = "triton"
    reads_index = True

    def indexed(self, x, index_R):
        return IndexedRows(x, index_R)

    def mm(self, rows, in_out, groups, bias=None, order_R=None):
        out = in_out.new_empty(groups.rows, in_out.shape[2])
        for expert, part, x in _pieces(rows, groups):
            product = x @ in_out[expert]
            out[part if order_R is None else order_R[part]] = product if bias is None else product + bias[expert]
        return out

    def outer(self, a, b, groups):
        widths = [_tensor(rows).shape[1] for rows in (a, b)]
        out = _tensor(a).new_zeros(len(groups.counts_e), *widths)
        for (expert, _, x), (_, _, y) in zip(_pieces(a, groups), _pieces(b, groups), strict=True):
            out[expert].addmm_(x.t(), y)
        return out

    def segment_sum(self, rows, groups, scale_R=None):
        out = _tensor(rows).new_zeros(len(groups.counts_e), _tensor(rows).shape[1])
        for expert, part, x in _pieces(rows, groups):
            out[expert] += x.sum(0) if scale_R is None else scale_R[part].to(x.dtype) @ x
        return out

    def row_dot(self, rows, vectors, groups):
        out = _tensor(rows).new_empty(groups.rows)
        for expert, part, x in _pieces(rows, groups):
            out[part] = x @ vectors[expert]
        return out

    def activate(self, pre, gate):
        out = pre.new_empty(len(pre), pre.shape[1] // 2)
        for begin in range(0, len(pre), _ROWS):
            out[begin : begin + _ROWS] = gate(pre[begin : begin + _ROWS])
        return out

    def up_gate(self, rows, in_out, groups, bias, gate):
        pre = self.mm(rows, in_out, groups, bias)
        return pre, self.activate(pre, gate)

    def activate_backward(self, pre, grad, scale_R, gate):
        grad_pre = torch.empty_like(pre)
        grad_scale = None if scale_R is None else pre.new_empty(len(pre), dtype=torch.float32)
        for begin in range(0, len(pre), _ROWS):
            part = slice(begin, begin + _ROWS)
            scale = None if scale_R is None else scale_R[part].to(pre.dtype)
            grad[part], of_scale = gate.backward(pre[part], grad[part], scale, grad_pre[part])
            if grad_scale is not None:
                grad_scale[part] = of_scale
        return grad_pre, grad, grad_scale


def _tensor(rows: Rows) -> torch.Tensor:
    return rows.x if isinstance(rows, IndexedRows) else rows


def _pieces(rows: Rows, groups: Groups) -> Iterator[tuple[int, slice, torch.Tensor]]:
    for expert, begin, end in groups:
        for first in range(begin, end, _ROWS):
            part = slice(first, min(first + _ROWS, end))
            yield expert, part, rows.x[rows.index_R[part]] if isinstance(rows, IndexedRows) else rows[part]


def stand_in() -> None:
    """Replace Triton's backend by ``IndexedBackend`` in this process."""
    os.environ["TRITON_INTERPRET"] = "1"  # a CPU refuses the setting otherwise
    forward.backend_named = lambda name: IndexedBackend()
