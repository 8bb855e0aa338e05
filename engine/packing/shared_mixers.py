"""Mixers that carry a state along a row (``sequences.py``), if the ranks of a group share the row.

Each rank has an equal slice of a packed row's tokens, and a mixer needs whole sequences. All ranks assign sequences to
ranks by their lengths, by the same rule. All-to-alls before and after the mixer exchange slices and sequences:

    [1, s, D]  ->  own sequences [1, n, D]  ->  mixer  ->  [1, n, D]  ->  [1, s, D]

If a rank would get much more than its share (one long sequence), the ranks split heads instead (``head_parts.py``). A
short convolution computes the slice, with the few tokens before it from other ranks. All other mixers compute a long
sequence on one rank.

Shapes: ``S`` tokens of the whole row, ``s = S / sp`` of this rank, ``n`` of the sequences assigned to this rank.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from ..model.families import SHORT_CONVOLUTIONS
from .attention import Span
from .exchange import Exchange, to_heads, to_tokens
from .head_parts import HeadParts, head_parts_of

__all__ = ["SharedMixers", "assign", "kernel_argument"]

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

    def spread(self, module: Any, forward: Callable[..., Any], gathers_by_calls: bool) -> Callable[..., Any] | None:
        """Return a forward on slices if the current row is unbalanced and the module allows it, else None.

        With ``gathers_by_calls`` all ranks have to call parts of the module equally often.
        """
        if self._whole or not self._is_unbalanced:
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
        tails = Exchange.apply(x[:, self._slice - kept :].expand(self.size, -1, -1).contiguous(), self.group)
        # Empty on the first rank, but still in the graph: the backward's exchange needs all ranks.
        context = tails.flatten(0, 1)[None, max(0, self.rank * kept - reach) : self.rank * kept]
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
        if _reach(module) is not None:
            return "by slices"
        return "by one rank" if head_parts_of(module, self.size) is None else "over its heads"

    def line(self, modules: Sequence[nn.Module]) -> str:
        """Format how these mixers share rows, for the log."""
        ways = sorted({type(module).__name__: self._way(module) for module in modules}.items())
        return "shared rows: " + "; ".join(f"{name}: whole sequences by rank, a long one {way}" for name, way in ways)


def _reach(module: nn.Module) -> int | None:
    """Return the number of earlier tokens that a short convolution reads; None for other mixers."""
    names = (SHORT_CONVOLUTIONS.get(each.__name__) for each in type(module).__mro__)
    convolution = next(filter(None, names), None)
    return None if convolution is None else getattr(module, convolution).kernel_size[0] - 1
