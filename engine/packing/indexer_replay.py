"""Indexer replay: attend, in an update, to the keys that were chosen when the old log-probs were computed.

The indexer of a sparse attention chooses a few keys of a sequence for each query. After the first of several updates it
chooses others, and the next update compares two different networks, as with routes (``moe/router/replay.py``). Here an
indexer's ``topk`` returns the recorded keys, in the order of its own scores.

The keys of a sequence of ``n`` tokens are bits: ``[indexers, heads, n, ceil(keys / 8)]`` uint8, flat. A key is a token
or a window of tokens. A sequence in which every key is chosen has none.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..model.layers import is_mtp
from ..moe.router.override import RoutingMode
from ..moe.router.replay import Differing, ReplayError
from ..wrap_forward import wrap_forward
from .attention import Span
from .sequences import PackedSequences, find_mixers
from .shared_mixers import Piece

__all__ = ["IndexerReplay", "indexers_of"]

_UNSEEN = torch.finfo(torch.float16).min / 2  # above the score of a key that a mask of any dtype hides


def indexers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the indexers of the policy's sparse attention, by FQN."""
    mixers = find_mixers(model).others.items()
    parts = {f"{fqn}.{name}": part for fqn, mixer in mixers for name, part in mixer.named_modules()}
    return {fqn: m for fqn, m in parts.items() if fqn.rpartition(".")[2] == "indexer" and not is_mtp(model, fqn)}


class IndexerReplay:
    """Records and replays the choices of a model's indexers; ranks of ``group`` share its packed rows."""

    def __init__(self, model: nn.Module, packed: PackedSequences, group: dist.ProcessGroup | None = None):
        self.differing = Differing()
        self._packed, self._group = packed, group
        self._recorded: dict[Span, torch.Tensor | None] = {}
        self._replayed: Mapping[Span, torch.Tensor] = {}
        self._counted: set[tuple[int, Span]] = set()
        indexers = indexers_of(model)
        self._indexers = len(indexers)
        for number, (fqn, indexer) in enumerate(indexers.items()):
            wrap_forward(indexer, "indexer_replay", functools.partial(self._call, number, fqn))

    def record(self, spans: Sequence[Span]) -> None:
        """Record the keys of the sequences with these spans of the row in the next forward."""
        self._recorded, self._replayed = dict.fromkeys(spans), {}

    def recorded(self, device: torch.device) -> list[torch.Tensor]:
        """Return the recorded keys of each sequence. Collective in ``group``."""
        found, self._recorded = self._recorded.values(), {}
        none = torch.empty(0, dtype=torch.uint8, device=device)
        flat = [none if bits is None else bits.flatten() for bits in found]
        if self._group is None:
            return flat
        sizes = torch.tensor([len(bits) for bits in flat], device=device)
        dist.all_reduce(sizes, dist.ReduceOp.MAX, self._group)
        lengths = sizes.tolist()
        row = torch.cat([F.pad(bits, (0, length - len(bits))) for bits, length in zip(flat, lengths, strict=True)])
        dist.all_reduce(row, dist.ReduceOp.MAX, self._group)  # each rank has the bits of its own queries
        return list(row.split(lengths))

    def replay(self, keys: Mapping[Span, torch.Tensor]) -> None:
        """Replay these keys of sequences, as ``recorded``, in the next forward and in its recomputations."""
        self._recorded, self._replayed, self._counted = {}, keys, set()
        nothing = torch.zeros(1, dtype=torch.bool, device=next(iter(keys.values())).device)
        self.differing.add(nothing, nothing)  # on ranks whose sequences leave no choice too

    def stop(self) -> None:
        """Let the indexers choose again."""
        self._recorded, self._replayed = {}, {}

    def _call(self, number: int, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        piece = self._packed.piece
        if piece is None or not piece.real:
            return forward(*args, **kwargs)
        if piece.span in self._recorded:
            choose = self._record
        elif piece.span in self._replayed:
            choose = self._replay
        else:
            return forward(*args, **kwargs)
        with _Choice(fqn, functools.partial(choose, number, piece)):
            return forward(*args, **kwargs)

    def _record(self, number: int, piece: Piece, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        queries = _queries(piece)
        bits = _pack(_chosen(scores, ids)[:, : queries.stop - queries.start])
        recorded = self._recorded[piece.span]
        if recorded is None:
            heads, _, width = bits.shape
            recorded = bits.new_zeros((self._indexers, heads, piece.span[1] - piece.span[0], width))
            self._recorded[piece.span] = recorded
        recorded[number, :, queries] = bits
        return ids

    def _replay(self, number: int, piece: Piece, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        by_head = _by_head(scores)
        bits = self._replayed[piece.span].view(self._indexers, len(by_head), piece.span[1] - piece.span[0], -1)
        wanted = _unpack(bits[number, :, _queries(piece)], scores.shape[-1])
        count = wanted.shape[1]
        counted = number, piece.queries or piece.span
        if counted not in self._counted:  # else a recomputation
            self._counted.add(counted)
            visible = by_head[:, :count] > _UNSEEN
            differs = (wanted != _chosen(scores, ids)[:, :count]) & visible
            self.differing.add(differs.any(-1), visible.sum(-1) > ids.shape[-1])
        # DeepSeek-V4's indexer gets a single query twice (``compressors.py``).
        wanted = wanted[:, torch.arange(scores.shape[-2], device=bits.device).clamp(max=count - 1)]
        return scores.masked_fill(~wanted.view_as(scores), -torch.inf).topk(ids.shape[-1], dim=-1).indices


class _Choice(RoutingMode):
    """In one call of an indexer, ``topk`` returns the ids from ``choose``, given the scores and its own ids."""

    def __init__(self, fqn: str, choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        super().__init__(num_experts=sys.maxsize)
        self._fqn, self._choose = fqn, choose

    def choose(self, scores: torch.Tensor, dim: int, native: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        if scores.dim() not in (3, 4) or dim not in (-1, scores.dim() - 1):
            raise ReplayError(
                f"{self._fqn} chooses from scores {tuple(scores.shape)}, not [1, (heads,) queries, keys]."
            )
        ids = native()
        return ids if ids.shape[-1] == scores.shape[-1] else self._choose(scores, ids)


def _queries(piece: Piece) -> slice:
    """Return the places in its sequence of the tokens of a piece."""
    start, end = piece.queries or piece.span
    return slice(start - piece.span[0], end - piece.span[0])


def _by_head(scores: torch.Tensor) -> torch.Tensor:
    """Return ``[heads, queries, keys]`` for ``[1, queries, keys]`` or ``[1, heads, queries, keys]``."""
    return scores.view(-1, *scores.shape[-2:])


def _chosen(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return ``[heads, queries, keys]`` bool."""
    return _by_head(torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids, True))


def _pack(chosen: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``[..., keys]`` bool as ``[..., ceil(keys / 8)]`` uint8."""
    eights = F.pad(chosen.to(torch.uint8), (0, -chosen.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (eights << torch.arange(8, dtype=torch.uint8, device=chosen.device)).sum(-1, dtype=torch.uint8)


def _unpack(bits: torch.Tensor, keys: int) -> torch.Tensor:
    """Return ``[..., keys]`` bool of ``[..., ceil(keys / 8)]`` uint8."""
    eights = bits[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    return eights.flatten(-2)[..., :keys].bool()
