"""Mixers that carry a state along a row (``sequences.py``), if the ranks of a group share the row.

Each rank has an equal slice of a packed row's tokens, and a mixer needs whole sequences. All ranks assign sequences to
ranks by their lengths, by the same rule. All-to-alls before and after the mixer exchange slices and sequences:

    [1, s, D]  ->  own sequences [1, n, D]  ->  mixer  ->  [1, n, D]  ->  [1, s, D]

If a rank would get much more than its share (one long sequence), the ranks split heads instead (``head_parts.py``). A
short convolution computes the slice, with the few tokens before it from other ranks. Sparse attention computes the
slice's queries, with all ranks' latents, keys of the indexer and inputs of compressors. All other mixers compute a long
sequence on one rank.

Shapes: ``S`` tokens of the whole row, ``s = S / sp`` of this rank, ``n`` of the sequences assigned to this rank.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache

from ..model.families import KEYS_BY_CACHE, SHORT_CONVOLUTIONS
from .attention import Span
from .exchange import Exchange, gather, to_heads, to_tokens
from .head_parts import HeadParts, head_parts_of

__all__ = ["Piece", "SharedKeys", "SharedMixers", "assign", "kernel_argument"]

_UNBALANCED = 1.25  # the largest load of a rank, in equal shares, up to which ranks get whole sequences


def assign(lengths: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each sequence: the longest first, each to the rank with the fewest tokens so far."""
    loads, owners = [0] * ranks, [0] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += lengths[number]
    return owners


def kernel_argument(name: str, spans: Sequence[Span]) -> torch.Tensor:
    """Return ``cu_seq_lens_q [sequences + 1]``, or ``seq_idx [1, S]``, the number of each token's sequence."""
    ends = torch.tensor([0, *(end for _, end in spans)])
    numbers = torch.arange(len(spans)).repeat_interleave(ends.diff())
    return ends if name == "cu_seq_lens_q" else numbers[None].int()


class SharedKeys:
    """Gathers the keys of a sequence in place of transformers' cache; ``tokens`` has each rank's number of tokens.

    It is also the ``layers`` of the cache, and each of them.
    """

    def __init__(self, group: dist.ProcessGroup, tokens: list[int]):
        self._group, self._tokens, self._own = group, tokens, tokens[dist.get_rank(group)]
        self.length, self._seen = sum(tokens), sum(tokens[: dist.get_rank(group) + 1])
        self.window = 1  # tokens that a compressor makes one key of

    @property
    def layers(self) -> "SharedKeys":
        return self

    def __getitem__(self, layer: int) -> "SharedKeys":
        return self

    def update(self, first: torch.Tensor, second: torch.Tensor, *_: Any, **__: Any) -> Sequence[torch.Tensor]:
        """Return the sequence's keys and values, or latents and rotary keys, ``[1, H, n, D]``."""
        if first is second:
            self.keys = values = self.update_index(first)
        else:
            both = self.update_index(torch.cat([first, second], dim=-1))
            self.keys, values = both.split([first.shape[-1], second.shape[-1]], dim=-1)
        return self.keys, values

    def get_seq_length(self) -> int:
        """Return the number of tokens up to this rank's last query, at least one."""
        return max(1, self._seen)

    def update_index(self, keys: torch.Tensor, *_: Any) -> torch.Tensor:
        """Return the sequence's keys ``[..., n, D]``."""
        return gather(self._group, keys[..., : self._own, :], self._tokens)

    update_indexer = update_index

    def store_compression_weights(
        self, name: str, keys: torch.Tensor, gates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the keys and gates of the sequence's whole windows, ``[1, n, D]`` each, and the first one's place."""
        keys, gates = self.update_index(torch.cat([keys, gates], dim=-1)).chunk(2, dim=-1)
        whole = self.length // self.window * self.window
        return keys[:, :whole], gates[:, :whole], 0

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        """Return that there is no window before the first."""
        return None, None

    def update_compressor_states(self, name: str, keys: torch.Tensor) -> torch.Tensor:
        """Return the compressed keys, which are those of the sequence already."""
        return keys


@dataclass(frozen=True)
class Piece:
    """A sequence in one call of a mixer, or only this rank's tokens of it.

    Args:
        place: span of the tokens in the mixer's input.
        span: the sequence's span in the row.
        queries: span of the tokens in the row; None for all of the sequence.
        keys: the cache of a sequence that ranks share, else None.
        real: whether the output is used; if not, a rank makes the call for its collectives alone.
    """

    place: Span
    span: Span
    queries: Span | None = None
    keys: SharedKeys | None = None
    real: bool = True


class SharedMixers:
    """Shares the mixers of a model among the ranks of ``group``, which are in the order of the slices.

    ``whole`` keeps sequences whole in unbalanced rows too, because parts of one have other bits.
    """

    def __init__(self, group: dist.ProcessGroup, whole: bool = False):
        self._whole = whole
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def begin(self, spans: Sequence[Span], device: torch.device) -> list[Span]:
        """Assign the next row's sequences to ranks; return this rank's spans, or if it has none, the first token's."""
        length = spans[-1][1]
        lengths = [end - start for start, end in spans]
        owners = assign(lengths, self.size)
        of_tokens = torch.tensor(owners).repeat_interleave(torch.tensor(lengths)).view(self.size, -1)
        loads = torch.bincount(of_tokens.flatten(), minlength=self.size)
        self._is_unbalanced = loads.max().item() * self.size > _UNBALANCED * length
        order = of_tokens[self.rank].argsort(stable=True)
        self._sent = torch.bincount(of_tokens[self.rank], minlength=self.size).tolist()
        self._received = (of_tokens == self.rank).sum(1).tolist()
        self._order, self._back = order.to(device), order.argsort().to(device)
        self._tokens = (of_tokens.flatten() == self.rank).nonzero()[:, 0].to(device)
        self._spans, self._slice = spans, length // self.size
        return [span for span, owner in zip(spans, owners, strict=True) if owner == self.rank] or [(0, 1)]

    def on_sequences(self, mixer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a mixer with this rank's sequences, and return the outputs of this rank's slice.

        A rank without a sequence calls it with one token and multiplies the output by zero. Its parameters then have
        gradients, and FSDP gathers them on all ranks.
        """
        args, kwargs = tree_map(self._to_sequences, (args, kwargs))
        output = mixer(*args, **kwargs)
        return (self._to_slice(output[0]), *output[1:]) if isinstance(output, tuple) else self._to_slice(output)

    @property
    def _is_idle(self) -> bool:
        return not any(self._received)

    def _to_sequences(self, value: Any) -> Any:
        """Exchange or select the tokens of this rank's sequences, if ``value`` has those of a slice or of the row."""
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return value
        row = self._slice * self.size
        if value.shape[1] == self._slice:
            sent = value.transpose(0, 1).index_select(0, self._order)
            own = Exchange.apply(sent, self.group, self._sent, self._received).transpose(0, 1)
            # Also on an idle rank: the backward's exchange needs all ranks. Its one token is the first of a sequence.
            first = value[:, :1] if value.is_floating_point() else torch.zeros_like(value[:, :1])
            return torch.cat([own, first], dim=1) if self._is_idle else own
        tokens = self._tokens.new_zeros(1) if self._is_idle else self._tokens
        if value.shape[1] == row:
            return value[:, tokens]
        return value[..., tokens] if value.dim() == 3 and value.shape[2] == row else value

    def _to_slice(self, output: torch.Tensor) -> torch.Tensor:
        sent = (output[:, :0] if self._is_idle else output).transpose(0, 1)
        slices = Exchange.apply(sent, self.group, self._received, self._sent).index_select(0, self._back)
        own = slices.transpose(0, 1)
        return own + 0.0 * output.sum() if self._is_idle else own

    def gathers_keys(self, module: nn.Module) -> bool:
        """Whether an attention computes pieces of sequences in the current row, and gathers their keys."""
        return self.spreads and _keeps_keys(module)

    @property
    def spreads(self) -> bool:
        """Whether ranks share single sequences of the current row."""
        return not self._whole and self._is_unbalanced

    def pieces(self, count: int = 0) -> list[Piece]:
        """Return the pieces of this rank's slice, and of sequences that other ranks share.

        Those with keys come first, on all ranks in one order. Calls without effect follow up to ``count`` pieces.
        """
        first, found = self.rank * self._slice, []
        slices = [(i * self._slice, (i + 1) * self._slice) for i in range(self.size)]
        for start, end in self._spans:
            keys = None
            if start // self._slice != (end - 1) // self._slice:
                keys = SharedKeys(self.group, [max(0, min(end, after) - max(start, at)) for at, after in slices])
            low, high = max(start, first), min(end, first + self._slice)
            if low < high:
                found.append(Piece((low - first, high - first), (start, end), (low, high), keys))
            elif keys is not None:
                found.append(Piece((0, 1), (start, end), (start, start + 1), keys, real=False))
        found.sort(key=lambda piece: piece.keys is None)
        return found + [Piece((0, 1), (0, 1), real=False)] * (count - len(found))

    def to_slice(self, value: Any) -> Any:
        """Return this rank's slice of a mixer's argument ``[1, S, ...]``, and other arguments as they are."""
        is_of_row = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == self._slice * self.size
        return value[:, self.rank * self._slice :][:, : self._slice] if is_of_row else value

    def spread(self, module: Any, forward: Callable[..., Any], gathers_by_calls: bool) -> Callable[..., Any] | None:
        """Return a forward on slices if the current row is unbalanced and the module allows it, else None.

        With ``gathers_by_calls`` all ranks have to call parts of the module equally often.
        """
        if not self.spreads:
            return None
        if (reach := _reach(module)) is not None:
            return None if gathers_by_calls else functools.partial(self._on_slice, forward, reach)
        parts = head_parts_of(module, self.size)
        return None if parts is None else functools.partial(self._on_heads, parts(module, self.group))

    def _on_slice(
        self, forward: Callable[..., torch.Tensor], reach: int, *, hidden_states: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Return a short convolution's output of the slice, ``[1, s, D]``, within sequences."""
        row, kwargs = self._with_tokens_before(hidden_states, reach), {**kwargs, "attention_mask": None}
        pieces = self._pieces(row.shape[1] - self._slice)
        outputs = [forward(hidden_states=row[:, start:end], **kwargs)[:, rest:] for start, end, rest in pieces]
        return torch.cat(outputs, dim=1)

    def _on_heads(self, parts: HeadParts, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return a mixer's output of the slice, ``[1, s, D]``; the recurrence runs on the row and this rank's heads."""
        whole = to_heads(self.group, *parts.project(hidden_states))
        lengths = [end - start for start, end in self._spans]
        sequences = zip(*(x.transpose(1, 2).flatten(2).split(lengths, dim=1) for x in whole), strict=True)
        mixed = torch.cat([parts.mix(*each) for each in sequences], dim=1)
        return parts.finish(hidden_states, to_tokens(self.group, mixed.unflatten(2, (parts.heads, -1))).flatten(2))

    def _with_tokens_before(self, x: torch.Tensor, reach: int) -> torch.Tensor:
        """Return ``[1, s, D]`` with up to ``reach`` tokens before it, from other ranks."""
        kept = min(reach, self._slice)
        tails = gather(self.group, x[:, self._slice - kept :])
        # Empty on the first rank, but still in the graph: the backward's exchange needs all ranks.
        context = tails[:, max(0, self.rank * kept - reach) : self.rank * kept]
        return torch.cat([context, x], dim=1)

    def _pieces(self, before: int) -> list[tuple[int, int, int]]:
        """Return start, end and other ranks' tokens of the sequences in a slice with ``before`` tokens before it."""
        first = self.rank * self._slice - before
        found = []
        for start, end in self._spans:
            start, end = max(start - first, 0), min(end - first, before + self._slice)
            if end > max(start, before):
                found.append((start, end, max(before - start, 0)))
        return found

    def _way(self, module: nn.Module) -> str:
        if _reach(module) is not None or _keeps_keys(module):
            return "by slices"
        return "by one rank" if head_parts_of(module, self.size) is None else "over its heads"

    def line(self, modules: Sequence[nn.Module]) -> str:
        """Format how these mixers share rows, for the log."""
        ways = sorted({type(module).__name__: self._way(module) for module in modules}.items())
        return "shared rows: " + "; ".join(f"{name}: whole sequences by rank, a long one {way}" for name, way in ways)


def _keeps_keys(module: nn.Module) -> bool:
    """Whether an attention keeps all that its keys are made of in transformers' cache; indexers do from 5.12."""
    if KEYS_BY_CACHE.isdisjoint(each.__name__ for each in type(module).__mro__):
        return False
    return hasattr(module, "compressor") or hasattr(Cache, "update_indexer")


def _reach(module: nn.Module) -> int | None:
    """Return the number of earlier tokens that a short convolution reads; None for other mixers."""
    names = (SHORT_CONVOLUTIONS.get(each.__name__) for each in type(module).__mro__)
    convolution = next(filter(None, names), None)
    return None if convolution is None else getattr(module, convolution).kernel_size[0] - 1
