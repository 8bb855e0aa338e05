"""Attention within each sequence of a packed row.

transformers passes sdpa and eager attention a mask of the whole row, which computes pairs of different sequences too.
Here the configured attention is called once per sequence, without a mask if it is causal. On a GPU one call computes
the whole row if the result is the same as sdpa's (``varlen.py``).

    q, k, v  [1, H, S, D]  ->  attention of each [1, H, n, D]  ->  [1, S, H, D]

The function and the mask function are registered with transformers under ``NAME``. The family's code gets a
``PackedMask``, which makes the masks of single sequences on demand.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import and_masks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..model.families import PLACES_AS_POSITIONS
from .varlen import attend_row, why_not_in_one_call

__all__ = [
    "NAME",
    "Lengths",
    "PackedAttention",
    "PackedMask",
    "Span",
    "Spans",
    "attach",
    "lengths_of",
    "pass_lengths",
    "scales_by_index",
    "spans_of",
    "wrap_attention",
]

NAME = "epfsdp2_packed"
_EAGER = "eager_attention_forward"  # in the module of every family
HANDLE = "_epfsdp2_packed"  # attribute of an attention module: its ``PackedAttention``
_LENGTHS = "_epfsdp2_lengths"  # attribute of an attention module: returns the ``Lengths`` of the current row

Lengths = dict[str, Any]
"""Sequence lengths of a row, as transformers passes them to flash attention: ``cu_seq_lens_q``, ``max_length_q``."""

Span = tuple[int, int]
"""Start and end of a sequence in its row."""
Spans = Callable[[], Sequence[Span] | None]
"""Returns the spans of the current row, or None if each row is one sequence."""

_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"  # transformers 5.23; it changes no distance
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
# Mask functions that depend only on the distance of tokens and on their distance to the start of their sequence.
_OF_DISTANCES = {
    _WINDOW,
    "bidirectional_mask_function",
    "causal_mask_function",
    "chunked_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
}


def spans_of(positions: torch.Tensor) -> tuple[Span, ...]:
    """Return the spans of a row's sequences, within which ``positions [S]`` count up by one; waits for the device."""
    ends = [*((positions.diff() != 1).cpu().nonzero()[:, 0] + 1).tolist(), positions.shape[0]]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def lengths_of(spans: Sequence[Span], device: torch.device) -> Lengths:
    """Return the lengths of a row's sequences, copied to a device without waiting for it."""
    ends = torch.tensor([0, *(end for _, end in spans)], dtype=torch.int32, pin_memory=device.type == "cuda")
    ends, longest = ends.to(device, non_blocking=True), max(end - start for start, end in spans)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


class PackedMask:
    """The mask of a packed row; makes the masks of its sequences on demand.

    Args:
        sparse, explicit: transformers' mask functions for the configured attention and for eager attention.
        asked: the family's arguments to the mask function, for the whole row.
    """

    def __init__(self, sparse: Callable[..., Any], explicit: Callable[..., Any], asked: dict[str, Any]):
        self._makers = {False: sparse, True: explicit}
        self._made = dict[tuple[int, ...], torch.Tensor | None]()
        parts = _intersected(asked["mask_function"])
        own = [part for part in parts if part.__qualname__ != _PACKED]
        # Functions of images' tokens need places in the row. transformers 5.24 would give them places in a sequence.
        self._of_distances = all(part.__qualname__ in _OF_DISTANCES for part in own)
        self._asked = {**asked, "mask_function": own[0] if len(own) == 1 else and_masks(*own)}
        names = {part.__qualname__ for part in own}
        self.is_causal = names == {"causal_mask_function"}
        self.window = asked.get("local_size") if names == {"causal_mask_function", _WINDOW} else None
        """Keys that a query sees if the mask is a causal window and nothing else; None for any other mask."""
        if self._of_distances and len(own) < len(parts):  # without packing, transformers skips causal masks
            self._asked["allow_is_causal_skip"] = True

    def of(self, span: Span, explicit: bool = False, queries: Span | None = None) -> torch.Tensor | None:
        """Return the mask ``[1, 1, q, n]`` of one sequence, or of its tokens at ``queries``.

        It is added to scores if ``explicit``, else None if none is needed.
        """
        start, length = span[0], span[1] - span[0]
        first, last = queries or span
        offset = 0 if self._of_distances else start  # a mask of distances is the same anywhere in the row
        key = offset, length, first - start, last - first, explicit
        if key not in self._made:
            sizes = {"q_length": last - first, "kv_length": length, "q_offset": offset + first - start}
            self._made[key] = self._makers[explicit](**{**self._asked, **sizes, "kv_offset": offset})
        return self._made[key]


def _intersected(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the mask functions that this one intersects, or the function itself if it is no known intersection."""
    inner = inspect.getclosurevars(function).nonlocals
    if function.__qualname__ == _REMAPPED:
        return _intersected(inner["mask_function"])
    if function.__qualname__ != "and_masks.<locals>.and_mask":
        return [function]
    return [part for each in inner.get("mask_functions", ()) for part in _intersected(each)] or [function]


@dataclass(frozen=True)
class PackedAttention:
    """One attention module's function for packed rows.

    Args:
        real: the configured attention function.
        explicit: it needs a mask to be causal (eager attention).
        lengths: of the current row if one kernel may compute it, else None.
        is_whole: it gets the whole row, with a mask of the row (flex attention).
        scales: it scales queries by their places in their sequence (``Llama4TextAttention`` of transformers 5.9).
    """

    real: Callable[..., Any]
    explicit: bool
    spans: Spans
    lengths: Callable[[], Lengths | None] = lambda: None
    is_whole: bool = False
    scales: bool = False

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Compute attention within each sequence, ``[1, H, S, D]`` -> ``[1, S, H, D]``; returns no weights.

        ``key`` and ``value`` may have fewer heads, and ``value`` another ``D``.

        Raises:
            ValueError: the row has another length than its positions, or the family's code made a mask of its own.
        """
        spans = self.spans()
        if self.scales:
            lengths = [end - start for start, end in spans or [(0, query.shape[2])]]
            places = torch.cat([torch.arange(length, device=query.device) for length in lengths])
            scale = torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
            query = (query * scale[:, None]).to(query.dtype)
        if spans is None or self.is_whole:
            return self.real(module, query, key, value, attention_mask, **kwargs)
        if query.shape[2] != spans[-1][1] or key.shape[2] != spans[-1][1]:
            raise ValueError(f"attention over {query.shape[2]} tokens in a packed row of {spans[-1][1]}.")
        if not isinstance(attention_mask, PackedMask):
            raise ValueError(f"{type(module).__name__} gets a mask that is not for packed rows.")
        row = self.lengths()
        if row is not None and why_not_in_one_call(module, query, key, value, attention_mask, kwargs) is None:
            return attend_row(query, key, value, row, attention_mask.window, kwargs.get("scaling")), None
        # A split's gradient is one tensor of the row's length; each slice's would be as long.
        lengths = [end - start for start, end in spans]
        parts = zip(*(each.split(lengths, dim=2) for each in (query, key, value)), spans, strict=True)
        outputs, window = list[torch.Tensor](), attention_mask.window
        for *heads, span in parts:
            if window is not None and span[1] - span[0] > 2 * window:
                outputs += self._attend_window(module, heads, window, kwargs)
            else:
                outputs.append(self.real(module, *heads, attention_mask.of(span, self.explicit), **kwargs)[0])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None

    def _attend_window(
        self, module: Any, heads: Sequence[torch.Tensor], window: int, kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Compute blocks of queries, as long as the window, with the keys of their own block and of the one before."""
        outputs, before = [], list[torch.Tensor]()  # no keys come before the first block
        for query, *block in zip(*(each.split(window, dim=2) for each in heads), strict=True):
            mask = _window_mask(query, window if before else 0, window, self.explicit)
            keys = [torch.cat(pair, dim=2) for pair in zip(before, block, strict=True)] if before else block
            outputs.append(self.real(module, query, *keys, mask, **kwargs)[0])
            before = block
        return outputs


def _window_mask(block: torch.Tensor, before: int, window: int, explicit: bool) -> torch.Tensor:
    """Return the mask ``[1, 1, queries, keys]`` of a block of queries whose keys begin ``before`` tokens earlier.

    It is boolean, or if ``explicit``, in the block's dtype and added to scores.
    """
    key = torch.arange(before + block.shape[2], device=block.device)
    query = key[before:, None]
    seen = ((key <= query) & (key > query - window))[None, None]
    return block.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(block.dtype).min) if explicit else seen


def attach(module: Any, configured: str, spans: Spans, lengths: Callable[[], Lengths | None]) -> None:
    """Set the ``PackedAttention`` of an attention module; ``configured`` is transformers' name of the attention."""
    explicit, code = configured == "eager", inspect.unwrap(type(module).forward).__globals__
    real, is_whole = code[_EAGER] if explicit else ALL_ATTENTION_FUNCTIONS[configured], configured == "flex_attention"
    setattr(module, HANDLE, PackedAttention(real, explicit, spans, lengths, is_whole, scales_by_index(module)))
    if scales_by_index(module):
        module.attn_temperature_tuning = False


def scales_by_index(module: Any) -> bool:
    """Whether an attention scales queries by their index in its input instead of their position."""
    attributes = PLACES_AS_POSITIONS.get(type(module).__name__)
    return attributes is not None and all(getattr(module, name) == value for name, value in attributes.items())


@torch.compiler.disable
def _attend(module: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    return getattr(module, HANDLE).attend(module, *args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)


def pass_lengths(name: str, modules: Iterable[Any], lengths: Callable[[], Lengths | None]) -> None:
    """Pass the lengths of the current row to flash attention, registered under ``name``, in these modules.

    transformers otherwise computes them in every layer and recomputation, and waits for the device each time (5.9,
    ``modeling_flash_attention_utils.py``, ``_prepare_from_posids``).
    """
    for module in modules:
        setattr(module, _LENGTHS, lengths)
    wrap_attention(name, _with_lengths)


def wrap_attention(name: str, wrapper: Callable[..., Any]) -> None:
    """Wrap ``wrapper(real, module, ...)`` around an attention function of transformers, once."""
    real = inner = ALL_ATTENTION_FUNCTIONS[name]
    while isinstance(inner, functools.partial):
        if inner.func is wrapper:
            return
        inner = inner.args[0] if inner.args else inner.func
    ALL_ATTENTION_FUNCTIONS.register(name, functools.partial(wrapper, real))


@torch.compiler.disable  # other rows have other lengths
def _with_lengths(
    real: Callable[..., Any],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    lengths = getattr(module, _LENGTHS, lambda: None)()
    if lengths is not None and attention_mask is None:
        kwargs |= {**lengths, "position_ids": None}
    return real(module, query, key, value, attention_mask, **kwargs)
