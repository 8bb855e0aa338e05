"""The operators of the experts on a CPU, with bits of a row that do not depend on the number of rows.

Measured with torch 2.13: a product of fewer than 16 rows may sum in another order than a larger one. Where a tensor's
size is no multiple of 32, ``exp`` and ``silu`` are scalar for its last elements, with another last bit. Multiples of
``ROWS`` rows avoid both, with one thread: several divide a product's sum.
"""

import functools

import torch

from .backends import ROWS, Backend, Groups, Rows
from .gate import Gate

__all__ = ["InvariantBackend", "padded"]


def padded(x: torch.Tensor) -> torch.Tensor:
    """Return ``x [R, ...]``, contiguous, with zero rows at its end to the next multiple of ``ROWS``."""
    missing = -len(x) % ROWS
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x.contiguous()


class InvariantBackend(Backend):
    """Torch's operators on rows that are padded with zeros.

    Args:
        parts: of the intermediate dim. The first linear is one product for each, the second the sum of theirs in order.
    """

    def __init__(self, parts: int = 1):
        self.parts = parts

    def _products(
        self, rows: torch.Tensor, in_out: torch.Tensor, groups: Groups, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out = rows.new_empty(groups.rows, in_out.shape[2])
        for expert, begin, end in groups:
            own = rows[begin:end]
            product = self._product(own if len(own) >= ROWS else padded(own), in_out[expert])[: len(own)]
            out[begin:end] = product if bias is None else product + bias[expert]
        return out

    def _product(self, rows: torch.Tensor, in_out: torch.Tensor) -> torch.Tensor:
        if self.parts == 1 or len(in_out) % self.parts:
            return torch.mm(rows, in_out)
        cut = zip(rows.chunk(self.parts, dim=1), in_out.chunk(self.parts), strict=True)
        return functools.reduce(torch.add, [torch.mm(a.contiguous(), b.mT.contiguous().mT) for a, b in cut])

    def up_gate(
        self, rows: Rows, in_out: torch.Tensor, groups: Groups, bias: torch.Tensor | None, gate: Gate
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.parts == 1:
            return super().up_gate(rows, in_out, groups, bias, gate)
        whole = InvariantBackend()
        # A product with some of the gates and the ups, as a worker has them, may have other bits than one with all.
        products = [whole.mm(rows, own.mT, groups).chunk(2, dim=1) for own in self._gates_and_ups(in_out.mT)]
        return torch.cat([part for half in zip(*products, strict=True) for part in half], dim=1), None

    def aligned(self, pre: torch.Tensor) -> torch.Tensor:
        return padded(pre)

    def activate(self, pre: torch.Tensor, gate: Gate) -> torch.Tensor:
        if self.parts == 1:
            return super().activate(padded(pre), gate)[: len(pre)]
        parts = [InvariantBackend().activate(own, gate) for own in self._gates_and_ups(pre)]
        return torch.cat(parts, dim=1)

    def _gates_and_ups(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of the gates and that of the ups of each worker, which are dim 1 of ``x``."""
        halves = [half.chunk(self.parts, dim=1) for half in x.chunk(2, dim=1)]
        return [torch.cat(own, dim=1) for own in zip(*halves, strict=True)]
