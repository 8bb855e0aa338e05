"""Causal attention whose result for a query has the same bits for any number of queries, and for any cache.

Keys are in blocks of ``_BLOCK``, and each block adds to a running maximum, sum and output of every query (online
softmax, in float32). A query that sees no key of a block adds exact zeros, so further blocks change nothing. All
products have multiples of ``ROWS`` rows (``engine/moe/gemm/invariant.py``).
"""

import torch
from torch.nn import functional

from ...engine.moe.gemm.backends import ROWS

__all__ = ["attend"]

_BLOCK = 64


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return causal attention ``[H, Q, D]`` of the last ``Q`` tokens of a sequence, in the dtype of ``query``.

    Args:
        query: ``[H, Q, D]``.
        key, value: ``[G, K, D]`` of all tokens; ``H`` is a multiple of ``G``.
    """
    heads, queries, width = query.shape
    groups, keys, _ = key.shape
    rows = heads // groups * queries
    position = torch.arange(keys - queries, keys, device=query.device).repeat(heads // groups)
    position = functional.pad(position, (0, -rows % ROWS))[:, None]
    q = functional.pad(query.float().reshape(groups, rows, width), (0, 0, 0, -rows % ROWS))
    k, v = (functional.pad(each.float(), (0, 0, 0, -keys % _BLOCK)) for each in (key, value))
    most, total, out = q.new_full((*q.shape[:2], 1), -torch.inf), q.new_zeros(*q.shape[:2], 1), torch.zeros_like(q)
    for first in range(0, keys, _BLOCK):
        block = slice(first, first + _BLOCK)
        scores = torch.bmm(q, k[:, block].transpose(1, 2)) * scaling
        scores = scores.masked_fill(torch.arange(first, first + _BLOCK, device=q.device) > position, -torch.inf)
        larger = torch.maximum(most, scores.detach().amax(-1, keepdim=True))
        factor, p = (most - larger).exp(), (scores - larger).exp()
        total, most = total * factor + p.sum(-1, keepdim=True), larger
        out = out * factor + torch.bmm(p, v[:, block])
    return (out / total)[:, :rows].reshape(heads, queries, width).to(query.dtype)
