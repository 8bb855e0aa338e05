"""Reduce a tile of logits ``[n, k]`` in forward, and compute its gradient in backward.

A GPU runs the kernels in ``triton_tiles.py``.
"""

import functools
import importlib.util
from types import ModuleType

import torch

__all__ = ["LABEL", "MOST", "TOTAL", "WEIGHTED", "WeightGradient", "add_product", "gradient_of", "reduce_tile"]

# The rows of ``sums`` for a token with logits z and maximum m: m, sum e^(z - m), sum e^(z - m) (z - m), the label's z.
MOST, TOTAL, WEIGHTED, LABEL = range(4)


@functools.cache
def _kernels(device: str, dtype: torch.dtype) -> ModuleType | None:
    if device != "cuda" or dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return None
    from . import triton_tiles

    return triton_tiles


def reduce_tile(
    logits: torch.Tensor, scale: torch.Tensor, labels: torch.Tensor, sums: torch.Tensor, with_entropy: bool
) -> None:
    """Add a tile to the ``sums [4, n]`` of its tokens, in place; the tile may be overwritten.

    Args:
        scale: ``[n]``, the factor of the logits.
        labels: ``[n]``, columns relative to the tile; another tile has the others.
    """
    if (kernels := _kernels(logits.device.type, scale.dtype)) is not None:
        return kernels.reduce_tile(logits, scale, labels, sums, with_entropy)
    z = _scaled(logits, scale)
    inside, column = _columns(labels, z)
    sums[LABEL] = torch.where(inside, z.gather(1, column[:, None])[:, 0], sums[LABEL])
    before = sums[MOST].clone()
    torch.maximum(before, z.amax(dim=1), out=sums[MOST])
    z -= sums[MOST, :, None]
    less = before - sums[MOST]
    factor = less.exp()
    e = z.exp() if with_entropy else z.exp_()
    if with_entropy:
        sums[WEIGHTED] = factor * (sums[WEIGHTED] + less * sums[TOTAL]) + torch.linalg.vecdot(e, z)
    sums[TOTAL] = factor * sums[TOTAL] + e.sum(dim=1)


def gradient_of(
    logits: torch.Tensor,
    scale: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    common: torch.Tensor,
    of_entropy: torch.Tensor | None,
    of_label: torch.Tensor,
) -> torch.Tensor:
    """Return a tile's gradient, ``p (common + of_entropy log p) + of_label [column == label]``, in the logits' dtype.

    It may overwrite the logits; all other arguments are ``[n]``.
    """
    if (kernels := _kernels(logits.device.type, scale.dtype)) is not None:
        return kernels.gradient_of(logits, scale, labels, lse, common, of_entropy, of_label)
    dtype, z = logits.dtype, _scaled(logits, scale)
    z -= lse[:, None]
    if of_entropy is None:
        z.exp_().mul_(common[:, None])
    else:
        p = z.exp()
        z.mul_(of_entropy[:, None]).add_(common[:, None]).mul_(p)
    inside, column = _columns(labels, z)
    rows = torch.arange(len(z), device=z.device)
    z[rows, column] += torch.where(inside, of_label, 0)  # each row once, so the order does not matter
    return z.to(dtype)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add ``a @ b`` to ``total``; a CPU rounds a product of a lower dtype before it adds."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class WeightGradient:
    """The gradient ``[V, D]`` of a head's weight, from tiles in the order of ``tile_slices``.

    Args:
        dtype: of the sums over tokens.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype):
        self.total, self._dtype, self._part = torch.empty_like(weight), dtype, weight

    def add(self, gradient: torch.Tensor, hidden: torch.Tensor, rows: slice, columns: slice) -> None:
        """Add a tile's, from the gradient of its logits and all hidden states ``[T, D]``."""
        own = self.total[columns]
        if rows.start == 0:
            self._part = own.zero_() if own.dtype == self._dtype else torch.zeros_like(own, dtype=self._dtype)
        add_product(self._part, gradient.t(), hidden[rows])
        if rows.stop == len(hidden) and own.dtype != self._dtype:
            own.copy_(self._part)


def _scaled(logits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Scale in the dtype of the scale, which is the wider one."""
    return logits.mul_(scale[:, None]) if logits.dtype == scale.dtype else logits * scale[:, None]


def _columns(labels: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of the labels in the tile, and a valid column for each."""
    return (labels >= 0) & (labels < z.shape[1]), labels.clamp(0, z.shape[1] - 1)
