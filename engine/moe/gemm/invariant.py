"""The operators of the experts on a CPU, with bits of a row that do not depend on the number of rows.

Measured with torch 2.13: a product of fewer than 16 rows may sum in another order than a larger one. Where a tensor's
size is no multiple of 32, ``exp`` and ``silu`` are scalar for its last elements, with another last bit. Multiples of
``ROWS`` rows avoid both, with one thread: several divide a product's sum.
"""

import torch

from .backends import ROWS, Backend, Groups, Rows, inverse
from .gate import Gate

__all__ = ["InvariantBackend"]


class InvariantBackend(Backend):
    """Torch's operators on rows that are padded with zeros."""

    def mm(
        self,
        rows: Rows,
        in_out: torch.Tensor,
        groups: Groups,
        bias: torch.Tensor | None = None,
        order_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(rows, torch.Tensor)
        out = rows.new_empty(groups.rows, in_out.shape[2])
        for expert, begin, end in groups:
            own = rows[begin:end]
            product = torch.mm(own if len(own) >= ROWS else self.aligned(own), in_out[expert])[: len(own)]
            out[begin:end] = product if bias is None else product + bias[expert]
        return out if order_R is None else self.take(out, inverse(order_R))

    def aligned(self, pre: torch.Tensor) -> torch.Tensor:
        missing = -len(pre) % ROWS
        return torch.cat((pre, pre.new_zeros(missing, pre.shape[1]))) if missing else pre

    def activate(self, pre: torch.Tensor, gate: Gate) -> torch.Tensor:
        return super().activate(self.aligned(pre), gate)[: len(pre)]
