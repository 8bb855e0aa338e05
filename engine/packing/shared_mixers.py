"""Mixers of tokens that carry a state along a row, where the ranks of a group share the row.

Each rank has an equal slice of the tokens of a packed row, and such a mixer (``sequences.py``) needs whole sequences.
They are assigned to the ranks by their lengths, by one rule on all ranks: an all-to-all brings a rank its sequences,
the mixer computes these, another all-to-all brings the outputs back. That is exact whatever is in the mixer.

    [1, s, D]  ->  own sequences [1, n, D]  ->  mixer  ->  [1, n, D]  ->  [1, s, D]

Where this leaves a rank with much more than its share (one long sequence), a mixer is spread over its heads instead:
projections, norm and gate are of the slice, and two all-to-alls around the recurrence bring a rank the whole row for
its part of the heads (``head_parts.py``). A mixer that is a short convolution computes the slice, and gets the few
tokens before it from the ranks that have them. Mixers of other kinds compute a long sequence on the one rank that was
assigned it.

Shapes: ``S`` tokens of the whole row, ``s = S / sp`` of this rank, ``n`` of the sequences that this rank was assigned.
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

_UNBALANCED = 1.25
"""The most that a rank is assigned, in equal shares, up to which no row is spread over heads."""


def assign(lengths: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each sequence: the longest first, each to the rank that has the fewest tokens."""
    loads, owners = [0] * ranks, [0] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += lengths[number]
    return owners


def kernel_argument(name: str, spans: Sequence[Span]) -> torch.Tensor:
    """Return the cumulative lengths ``[sequences + 1]``, or the number of each token's sequence ``[1, S]``.

    Args:
        name: ``cu_seq_lens_q`` or ``seq_idx``.
    """
    ends = torch.tensor([0, *(end for _, end in spans)])
    numbers = torch.arange(len(spans)).repeat_interleave(ends.diff())
    return ends if name == "cu_seq_lens_q" else numbers[None].int()


class SharedMixers:
    """How the ranks of a group share the mixers of a model; of one row after the other.

    Args:
        group: the ranks that share rows, in the order of the slices.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def begin(self, spans: Sequence[Span], device: torch.device) -> list[Span]:
        """Assign the sequences of a row to ranks.

        Args:
            spans: where they are in the row.
            device: of the hidden states.

        Returns:
            Those of this rank, in the order of the row; the row's first token alone where there is none.

        Raises:
            ValueError: the row can't be cut into equal slices.
        """
        length = spans[-1][1]
        if length % self.size:
            raise ValueError(f"{length} tokens can't be cut into {self.size} equal slices.")
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

    # -- whole sequences ----------------------------------------------------------------------------------------

    def on_sequences(self, mixer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a mixer with the sequences that this rank was assigned, and bring the outputs to their slices.

        A rank without a sequence calls it with a token whose output counts nothing: its parameters have gradients, and
        it takes part in what is gathered.
        """
        args, kwargs = tree_map(self._hand, (args, kwargs))
        output = mixer(*args, **kwargs)
        if isinstance(output, tuple):
            return self._bring_back(output[0]), *output[1:]
        return self._bring_back(output)

    @property
    def _is_idle(self) -> bool:
        return not any(self._received)

    def _hand(self, value: Any) -> Any:
        """Return what belongs to the tokens of the slice, or of the row, as it is for the sequences of this rank."""
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return value
        row = self._slice * self.size
        if value.shape[1] == self._slice:
            sent = value.transpose(0, 1).index_select(0, self._order)
            own = Exchange.apply(sent, self.group, self._sent, self._received).transpose(0, 1)
            # The exchange stays a part of what is differentiated, as it is on the other ranks.
            return torch.cat([own, value[:, :1]], dim=1) if self._is_idle else own
        tokens = self._tokens.new_zeros(1) if self._is_idle else self._tokens
        if value.shape[1] == row:
            return value[:, tokens]
        return value[..., tokens] if value.dim() == 3 and value.shape[2] == row else value

    def _bring_back(self, output: torch.Tensor) -> torch.Tensor:
        sent = (output[:, :0] if self._is_idle else output).transpose(0, 1)
        slices = Exchange.apply(sent, self.group, self._received, self._sent).index_select(0, self._back)
        own = slices.transpose(0, 1)
        return own + 0.0 * output.sum() if self._is_idle else own

    # -- slices -------------------------------------------------------------------------------------------------

    def spreads(self, module: nn.Module, gathers_by_calls: bool) -> bool:
        """Tell whether the ranks compute their slices of this row, by heads or with the tokens before.

        Args:
            gathers_by_calls: the ranks have to call parts of the module equally often.
        """
        by_calls = gathers_by_calls and _reach(module) is not None
        return self._is_unbalanced and self._can_spread(module) and not by_calls

    def _can_spread(self, module: Any) -> bool:
        """Tell whether it is a short convolution, or has heads that divide by the ranks."""
        return _reach(module) is not None or head_parts_of(module, self.size) is not None

    def spread(self, module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return what computes the slice of the tokens, for a module that ``spreads``.

        Args:
            forward: the module's.
        """
        reach = _reach(module)
        if reach is not None:
            return functools.partial(self._on_slice, forward, reach)
        parts = head_parts_of(module, self.size)
        assert parts is not None
        return functools.partial(self._on_heads, parts(module, self.group))

    def _on_slice(
        self, forward: Callable[..., torch.Tensor], reach: int, *, hidden_states: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """A mixer that sees ``reach`` tokens back: its output of the slice, ``[1, s, D]``, within sequences."""
        row, kwargs = self._with_tokens_before(hidden_states, reach), {**kwargs, "attention_mask": None}
        pieces = self._pieces(row.shape[1] - self._slice)
        outputs = [forward(hidden_states=row[:, start:end], **kwargs)[:, rest:] for start, end, rest in pieces]
        return torch.cat(outputs, dim=1)

    def _on_heads(self, parts: HeadParts, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """A mixer of the slice, ``[1, s, D]``, whose recurrence is of the whole row and this rank's heads."""
        whole = to_heads(self.group, *parts.project(hidden_states))
        lengths = [end - start for start, end in self._spans]
        sequences = zip(*(x.transpose(1, 2).flatten(2).split(lengths, dim=1) for x in whole), strict=True)
        mixed = torch.cat([parts.mix(*each) for each in sequences], dim=1)
        return parts.finish(hidden_states, to_tokens(self.group, mixed.unflatten(2, (parts.heads, -1))).flatten(2))

    def _with_tokens_before(self, x: torch.Tensor, reach: int) -> torch.Tensor:
        """``[1, s, D]`` and as many tokens before it, of the ranks that have them; fewer where the row begins."""
        kept = min(reach, self._slice)
        tails = Exchange.apply(x[:, self._slice - kept :].expand(self.size, -1, -1).contiguous(), self.group)
        # Empty on the first rank, but a part of what is differentiated: every rank exchanges in backward.
        context = tails.flatten(0, 1)[None, max(0, self.rank * kept - reach) : self.rank * kept]
        return torch.cat([context, x], dim=1)

    def _pieces(self, before: int) -> list[tuple[int, int, int]]:
        """The sequences in a slice that has ``before`` tokens before it: start, end, and tokens that others have."""
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
        return "over its heads" if self._can_spread(module) else "by one rank"

    def line(self, modules: Sequence[nn.Module]) -> str:
        """Format how these mixers share rows, for the log."""
        ways = {type(module).__name__: self._way(module) for module in modules}
        said = "; ".join(f"{name}: whole sequences by rank, a long one {way}" for name, way in sorted(ways.items()))
        return f"shared rows: {said}"


def _reach(module: nn.Module) -> int | None:
    """Return how many tokens before one a short convolution takes with it; None of other mixers."""
    names = (SHORT_CONVOLUTIONS.get(each.__name__) for each in type(module).__mro__)
    convolution = next(filter(None, names), None)
    return None if convolution is None else getattr(module, convolution).kernel_size[0] - 1
