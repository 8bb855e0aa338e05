"""Log-probs of labels and entropies from hidden states, a tile of the logits at a time.

A token has logits ``z_t = (weight @ hidden_t + bias) / temperature_t``, ``p = softmax(z)``, and a label ``y``:

    log_prob = z_y - lse(z)        d log_prob / dz_j = [j == y] - p_j
    entropy  = lse(z) - p @ z      d entropy / dz_j  = -p_j * (log p_j + entropy)

A tile is some tokens by a part of the vocabulary, small enough for a cache. The forward keeps running maxima and sums
over the tiles of a row (Milakov and Gimelshein, arXiv:1805.02867), and computes ``lse`` from them. The backward
computes each tile again.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from ..moe.gemm.backends import ROWS
from .tiles import LABEL, MOST, TOTAL, WEIGHTED, WeightGradient, add_product, gradient_of, reduce_tile

__all__ = [
    "log_probs_and_entropy",
    "log_softmax",
    "logits_scale",
    "tile_bytes",
    "tile_sizes",
    "tile_slices",
    "whole_logits",
]


def tile_sizes(device_type: str) -> tuple[int, int]:
    """Return a tile's number of tokens and of columns: 1 MiB of float32 on a CPU, large GEMMs on a GPU."""
    return (256, 1024) if device_type == "cpu" else (2048, 16384)


def tile_bytes(tokens: int, outputs: int, width: int, dtype: torch.dtype, device_type: str) -> int:
    """Return the peak bytes of a backward, without gradients of ``dtype``.

    A GPU holds the tile in the compute dtype, a CPU twice in float32. A lower compute dtype adds float32 sums of the
    gradients of the hidden states and of the tile's weights. On a CPU it also adds the tile, its gradient and one
    product in that dtype.

    Args:
        outputs: rows of the head's weight.
        width: of the hidden states.
    """
    rows, columns = (min(most, size) for most, size in zip(tile_sizes(device_type), (tokens, outputs), strict=True))
    is_lower = dtype.itemsize < 4
    element = dtype.itemsize if device_type == "cuda" else 2 * (4 + dtype.itemsize * is_lower)
    of_tile = element * rows * columns
    if not is_lower:
        return of_tile
    of_product = 0 if device_type == "cuda" else dtype.itemsize * width * max(rows, columns)
    return of_tile + of_product + 4 * width * (tokens + columns)


def log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperature: torch.Tensor,
    with_entropy: bool,
) -> torch.Tensor:
    """Return log-probs and, ``with_entropy``, entropies: ``[T, 1]`` or ``[T, 2]``, at least float32.

    Logits are computed in the dtype of the weights, as in any head, and reduced in float32 (float64 for float64).

    Args:
        hidden, weight, bias: ``[T, D]``, ``[V, D]`` and ``[V]``, of one dtype.
        labels, temperature: ``[T]``; int64 below ``V``, and positive.
    """
    return _LogProbs.apply(hidden, weight, bias, labels, temperature, with_entropy)  # type: ignore[no-any-return]


def whole_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return logits ``[T, V]`` with the bits that they have in ``log_probs_and_entropy``; not differentiable."""
    out = hidden.new_empty(len(hidden), len(weight))
    for rows, columns, logits in _tiles(hidden, weight, bias):
        out[rows, columns] = logits
    return out


def log_softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return float32 log-probs ``[T, V]``, each with the bits that ``log_probs_and_entropy`` gives to a label.

    Args:
        logits, temperature: ``[T, V]`` and ``[T]``.
    """
    tokens, missing = len(logits), -len(logits) % ROWS
    logits, temperature = functional.pad(logits, (0, 0, 0, missing)), functional.pad(temperature, (0, missing), value=1)
    scale = logits_scale(temperature, torch.float32)
    sums, labels = _sums(scale), torch.zeros_like(temperature, dtype=torch.long)
    for rows, columns in tile_slices(tokens + missing, logits.shape[1], *tile_sizes(logits.device.type)):
        tile = logits[rows, columns].clone(memory_format=torch.contiguous_format)
        reduce_tile(tile, scale[rows], labels[rows], sums[:, rows], False)
    lse = sums[MOST] + sums[TOTAL].log()
    return (logits * scale[:, None] - lse[:, None])[:tokens]


def logits_scale(temperature: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the factor of each token's logits."""
    return temperature.to(dtype).clamp(min=1e-8).reciprocal()  # verl's bound


def _sums(scale: torch.Tensor) -> torch.Tensor:
    sums = scale.new_zeros((4, len(scale)))
    sums[MOST] = torch.finfo(scale.dtype).min  # not -inf, because -inf - -inf is NaN
    return sums


def _tiles(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield slices of tokens and columns, and the tile's unscaled logits, whose memory the next tile overwrites."""
    tokens, outputs = len(hidden), len(weight)
    most_rows, most_columns = tile_sizes(hidden.device.type)
    memory = weight.new_empty(min(most_rows, tokens) * min(most_columns, outputs))
    for rows, columns in tile_slices(tokens, outputs, most_rows, most_columns):
        shape = rows.stop - rows.start, columns.stop - columns.start
        logits = memory[: shape[0] * shape[1]].view(shape)
        torch.mm(hidden[rows], weight[columns].t(), out=logits)
        yield rows, columns, logits if bias is None else logits.add_(bias[columns])


def tile_slices(tokens: int, outputs: int, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of tokens and columns; tokens vary fastest, so that a part of the weight stays cached."""
    for first in range(0, outputs, columns):
        for token in range(0, tokens, rows):
            yield slice(token, min(token + rows, tokens)), slice(first, min(first + columns, outputs))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, temperature, with_entropy):  # type: ignore[override]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        scale = logits_scale(temperature, dtype)
        sums = _sums(scale)
        for rows, columns, logits in _tiles(hidden, weight, bias):
            reduce_tile(logits, scale[rows], labels[rows] - columns.start, sums[:, rows], with_entropy)
        log_total = sums[TOTAL].log()
        lse, entropy = sums[MOST] + log_total, log_total - sums[WEIGHTED] / sums[TOTAL]
        ctx.save_for_backward(hidden, weight, bias, labels, scale, lse, entropy)
        ctx.with_entropy = with_entropy
        log_probs = sums[LABEL] - lse
        return torch.stack((log_probs, entropy) if with_entropy else (log_probs,), dim=-1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        hidden, weight, bias, labels, scale, lse, entropy = ctx.saved_tensors
        # The gradient of a logit is p (common + of_entropy log p) + of_label [j == y].
        of_label, of_entropy = grad[:, 0] * scale, None
        common = -of_label
        if ctx.with_entropy:
            of_entropy = -grad[:, 1] * scale
            common = common + of_entropy * entropy
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if for_hidden else None
        to_weight = WeightGradient(weight, lse.dtype) if for_weight else None
        to_bias = torch.zeros_like(bias, dtype=lse.dtype) if for_bias else None
        for rows, columns, logits in _tiles(hidden, weight, bias):
            entropies = None if of_entropy is None else of_entropy[rows]
            label = labels[rows] - columns.start
            grads = gradient_of(logits, scale[rows], label, lse[rows], common[rows], entropies, of_label[rows])
            if to_hidden is not None:
                add_product(to_hidden[rows], grads, weight[columns])
            if to_bias is not None:
                to_bias[columns] += grads.sum(dim=0, dtype=lse.dtype)
            if to_weight is not None:
                to_weight.add(grads, hidden, rows, columns)
        to_hidden, to_bias = (None if sums is None else sums.to(weight.dtype) for sums in (to_hidden, to_bias))
        return to_hidden, None if to_weight is None else to_weight.total, to_bias, None, None, None
