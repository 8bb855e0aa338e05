"""Cross-entropy of a draft's distribution with the policy's, a tile of the logits at a time.

A token has policy logits ``y = (weight @ target_t + bias) / temperature_t``, and draft logits ``z`` from ``draft_t`` by
the same head or by one of its own:

    p, q = softmax(y), softmax(z)        loss = -p @ log q = lse(z) - p @ z        d loss / dz = q - p

Tiles are those of ``log_probs.py``.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from .log_probs import logits_scale, tile_sizes, tile_slices
from .tiles import WeightGradient, add_product

__all__ = ["soft_cross_entropy"]


def soft_cross_entropy(
    draft: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    draft_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses ``[T]``, at least float32, and whether both distributions have the same mode, bool ``[T]``.

    Only ``draft`` and ``draft_weight`` get a gradient.

    Args:
        draft, target, weight, bias: ``[T, D]``, ``[T, D]``, ``[V, D]`` and ``[V]``, of one dtype.
        temperature: ``[T]``, positive.
        draft_weight: ``[V, D]``, of a draft's own head, which has no bias; None if the head is the policy's.
    """
    return _SoftCrossEntropy.apply(  # type: ignore[no-any-return]
        draft, target, weight, bias, temperature, draft_weight
    )


class _Sums:
    """Running maximum, its column and the sum of exponentials over the tiles of each row."""

    def __init__(self, like: torch.Tensor):
        self.most = torch.full_like(like, torch.finfo(like.dtype).min)
        self.total, self.mode = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.long)

    def add(self, logits: torch.Tensor, rows: slice, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a tile from column ``first``; return its exponentials and the factor of earlier sums."""
        most, column = logits.max(dim=1)
        before = self.most[rows].clone()
        self.mode[rows] = torch.where(most > before, column + first, self.mode[rows])
        self.most[rows] = torch.maximum(before, most)
        factor, exponentials = (before - self.most[rows]).exp(), (logits - self.most[rows, None]).exp()
        self.total[rows] = factor * self.total[rows] + exponentials.sum(dim=1)
        return exponentials, factor

    def lse(self) -> torch.Tensor:
        return self.most + self.total.log()


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, draft, target, weight, bias, temperature, draft_weight):  # type: ignore[override]
        scale = logits_scale(temperature, torch.promote_types(weight.dtype, torch.float32))
        of_draft, of_target, weighted = _Sums(scale), _Sums(scale), torch.zeros_like(scale)
        inputs = draft, target, weight, bias, scale, draft_weight
        for rows, columns, z, y in _tiles(*inputs):
            of_draft.add(z, rows, columns.start)
            exponentials, factor = of_target.add(y, rows, columns.start)
            weighted[rows] = factor * weighted[rows] + torch.linalg.vecdot(exponentials, z)
        lse = of_draft.lse()
        ctx.save_for_backward(*inputs, lse, of_target.lse())
        agrees = of_draft.mode == of_target.mode
        ctx.mark_non_differentiable(agrees)
        return lse - weighted / of_target.total, agrees

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[override]
        *inputs, lse, lse_target = ctx.saved_tensors
        draft, _, weight, _, scale, draft_weight = inputs
        to_draft, to_weight = torch.zeros_like(draft, dtype=lse.dtype), None
        if draft_weight is not None:
            weight, to_weight = draft_weight, WeightGradient(draft_weight, lse.dtype)
        for rows, columns, z, y in _tiles(*inputs):
            tile = z.sub_(lse[rows, None]).exp_() - y.sub_(lse_target[rows, None]).exp_()
            tile *= (grad * scale)[rows, None]
            gradient = tile.to(weight.dtype)
            add_product(to_draft[rows], gradient, weight[columns])
            if to_weight is not None:
                to_weight.add(gradient, draft, rows, columns)
        return to_draft.to(draft.dtype), None, None, None, None, None if to_weight is None else to_weight.total


def _tiles(
    draft: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    draft_weight: torch.Tensor | None,
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
    """Yield slices of tokens and columns, and the logits of draft and target there."""
    head = weight, bias
    heads = (draft, *(head if draft_weight is None else (draft_weight, None))), (target, *head)

    def logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product = functional.linear(hidden[rows], weight[columns], None if bias is None else bias[columns])
        return product.to(scale.dtype) * scale[rows, None]

    for rows, columns in tile_slices(len(draft), len(weight), *tile_sizes(draft.device.type)):
        z, y = (logits(*each) for each in heads)
        yield rows, columns, z, y
