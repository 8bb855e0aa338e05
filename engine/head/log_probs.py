"""Log-probs of given tokens and entropies from hidden states, a tile of the logits at a time.

With logits ``z_t = (weight @ hidden_t + bias) / temperature_t`` of a token, ``p = softmax(z)`` and a label ``y``:

    log_prob = z_y - lse(z)        d log_prob / dz_j = [j == y] - p_j
    entropy  = lse(z) - p @ z      d entropy / dz_j  = -p_j * (log p_j + entropy)

A tile is some tokens by some of the vocabulary, small enough that what is computed of it finds it in a cache. The
forward keeps running maxima and sums over the tiles of a row (Milakov and Gimelshein, arXiv:1805.02867) and of them
``lse``; the backward multiplies once more, and then by the tile's gradient. Whole logits never exist, but those of few
tokens or a small vocabulary on a CPU, which backward then need not compute again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .tiles import LABEL, MOST, TOTAL, WEIGHTED, add_product, gradient_of, reduce_tile

__all__ = ["log_probs_and_entropy", "tile_bytes", "tile_sizes"]


_KEPT_BYTES = 64 << 20  # most bytes of whole logits that a CPU keeps for backward


def tile_sizes(device_type: str) -> tuple[int, int]:
    """Return the tokens and the rows of the vocabulary in a tile: 1 MiB of float32 on a CPU, large GEMMs on a GPU."""
    return (256, 1024) if device_type == "cpu" else (2048, 16384)


def tile_bytes(tokens: int, outputs: int, width: int, dtype: torch.dtype, device_type: str) -> int:
    """Return the bytes that a backward holds at most besides gradients of ``dtype``.

    On a GPU these are the tile in the compute dtype; on a CPU the tile twice in float32, and in a lower compute dtype
    the tile and its gradient in it, and whole logits that are kept. In a lower one also the gradients of the hidden
    states and of the tile's weights, which are summed in float32, and on a CPU one product of them.

    Args:
        width: of the hidden states.
    """
    rows, columns = (min(most, size) for most, size in zip(tile_sizes(device_type), (tokens, outputs), strict=True))
    is_lower = dtype.itemsize < 4
    element = dtype.itemsize if device_type == "cuda" else 2 * (4 + dtype.itemsize * is_lower)
    of_tile = element * rows * columns + _kept_bytes(tokens, outputs, dtype, device_type)
    if not is_lower:
        return of_tile
    of_product = 0 if device_type == "cuda" else dtype.itemsize * width * max(rows, columns)
    return of_tile + of_product + 4 * width * (tokens + columns)


def _kept_bytes(tokens: int, outputs: int, dtype: torch.dtype, device_type: str) -> int:
    """Return the bytes of the logits if forward keeps them for backward, else 0."""
    whole = tokens * outputs * dtype.itemsize
    return whole if device_type == "cpu" and whole <= _KEPT_BYTES else 0


def log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperature: torch.Tensor,
    with_entropy: bool,
) -> torch.Tensor:
    """Return the log-probs of the labels and, if asked for, the entropies: ``[T, 2]`` or ``[T, 1]``, at least float32.

    Logits are computed in the dtype of the weights, as a head does, and reduced in float32 (float64 in float64).

    Args:
        hidden: ``[T, D]``.
        weight: ``[V, D]``, of the same dtype.
        bias: ``[V]``, or None.
        labels: ``[T]``, int64, each below ``V``.
        temperature: ``[T]``, positive.
    """
    return _LogProbs.apply(hidden, weight, bias, labels, temperature, with_entropy)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Tile:
    """Slices of the tokens and of the vocabulary."""

    tokens: slice
    columns: slice


def _tiles(tokens: int, outputs: int, device_type: str) -> Iterator[_Tile]:
    """Yield all tokens of one part of the vocabulary before the next, so that its weights and gradients stay cached."""
    rows, columns = tile_sizes(device_type)
    for first in range(0, outputs, columns):
        for token in range(0, tokens, rows):
            yield _Tile(slice(token, min(token + rows, tokens)), slice(first, min(first + columns, outputs)))


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: _Tile,
    out: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a tile of the logits before they are scaled, or take it of those that were kept, in memory of ``out``."""
    rows, columns = hidden[tile.tokens], weight[tile.columns]
    logits = out[: len(rows) * len(columns)].view(len(rows), len(columns))
    if kept is not None:
        return logits.copy_(kept[tile.tokens, tile.columns])
    torch.mm(rows, columns.t(), out=logits)
    return logits if bias is None else logits.add_(bias[tile.columns])


def _room_for_a_tile(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, columns = tile_sizes(hidden.device.type)
    return weight.new_empty(min(rows, len(hidden)) * min(columns, len(weight)))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, temperature, with_entropy):  # type: ignore[override]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        scale = temperature.to(dtype).clamp(min=1e-8).reciprocal()  # verl's bound
        sums = scale.new_zeros((4, len(hidden)))
        sums[MOST] = torch.finfo(dtype).min  # minus infinity has no difference to itself
        room, kept = _room_for_a_tile(hidden, weight), None
        if any(ctx.needs_input_grad) and _kept_bytes(len(hidden), len(weight), weight.dtype, hidden.device.type):
            kept = weight.new_empty(len(hidden), len(weight))
        for tile in _tiles(len(hidden), len(weight), hidden.device.type):
            logits = _logits(hidden, weight, bias, tile, room)
            if kept is not None:
                kept[tile.tokens, tile.columns] = logits
            own = labels[tile.tokens] - tile.columns.start
            reduce_tile(logits, scale[tile.tokens], own, sums[:, tile.tokens], with_entropy)
        log_total = sums[TOTAL].log()
        lse, entropy = sums[MOST] + log_total, log_total - sums[WEIGHTED] / sums[TOTAL]
        ctx.save_for_backward(hidden, weight, bias, labels, scale, lse, entropy, kept)
        ctx.with_entropy = with_entropy
        log_probs = sums[LABEL] - lse
        return torch.stack((log_probs, entropy) if with_entropy else (log_probs,), dim=-1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        hidden, weight, bias, labels, scale, lse, entropy, kept = ctx.saved_tensors
        # p (common + of_entropy log p) + of_label [j == y] is the gradient of a logit.
        of_label, of_entropy = grad[:, 0] * scale, None
        common = -of_label
        if ctx.with_entropy:
            of_entropy = -grad[:, 1] * scale
            common = common + of_entropy * entropy
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if for_hidden else None
        to_weight = torch.empty_like(weight) if for_weight else None
        to_bias = torch.zeros_like(bias, dtype=lse.dtype) if for_bias else None
        room = _room_for_a_tile(hidden, weight)
        for tile in _tiles(len(hidden), len(weight), hidden.device.type):
            rows, columns = tile.tokens, tile.columns
            logits = _logits(hidden, weight, bias, tile, room, kept)
            entropies = None if of_entropy is None else of_entropy[rows]
            own = labels[rows] - columns.start
            grads = gradient_of(logits, scale[rows], own, lse[rows], common[rows], entropies, of_label[rows])
            if to_hidden is not None:
                add_product(to_hidden[rows], grads, weight[columns])
            if to_bias is not None:
                to_bias[columns] += grads.sum(dim=0, dtype=lse.dtype)
            if to_weight is not None:
                if rows.start == 0:
                    part = _zeros(to_weight[columns], lse.dtype)
                add_product(part, grads.t(), hidden[rows])
                if rows.stop == len(hidden) and part.dtype != to_weight.dtype:
                    to_weight[columns] = part
        return _cast(to_hidden, hidden), to_weight, _cast(to_bias, bias), None, None, None


def _zeros(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros to sum in: ``like`` itself if it has the dtype."""
    return like.zero_() if like.dtype == dtype else torch.zeros_like(like, dtype=dtype)


def _cast(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)
