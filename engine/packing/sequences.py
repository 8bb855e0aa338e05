"""Compute each sequence of a packed row as if it were alone, in every family.

Mixers are the modules in which tokens of a row meet; they are found by their forward's arguments. Attention on
transformers' interface runs once per sequence, or by a kernel that gets their lengths (``attention.py``). Other mixers
carry a state along the row (linear attention, state spaces, short convolutions), or choose or compress its keys. They
are called once per sequence, which is exact for any module, unless their kernels accept sequence lengths. The
fallbacks in torch have the same arguments and ignore them.

If ranks share a row (``shared_mixers.py``), attention gets all sequences and a part of the heads. Other mixers get the
sequences that are assigned to their rank.
"""

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    eager_mask,
    packed_sequence_mask_function,
)

from ..model.families import UNPACKED_WITH_FLASH
from ..model.layers import attention_modules, decoder_layers
from ..wrap_forward import wrap_forward
from .attention import NAME, Lengths, PackedMask, Span, attach, lengths_of, pass_lengths, scales_by_index, spans_of
from .positions import embed_apart
from .shared_mixers import Piece, SharedMixers, kernel_argument
from .varlen import fastest

__all__ = ["Mixers", "PackedSequences", "find_mixers", "lengths_taken", "why_not_packed"]

# Arguments of mixers' forwards: masks and caches, by all their names up to transformers 5.24.
_OF_TOKENS = {"attention_mask", "cache", "cache_params", "conv_mask", "layer_past", "past_key_value", "past_key_values"}
# Kernels of stateful mixers: the kernel's argument for sequences, and the argument of the module's forward.
_KERNELS = {
    "causal_conv1d_fn": ("seq_idx", "seq_idx"),
    "chunk_gated_delta_rule": ("cu_seqlens", "cu_seq_lens_q"),
    "mamba_chunk_scan_combined": ("seq_idx", "seq_idx"),
    "mamba_split_conv1d_scan_combined": ("seq_idx", "seq_idx"),
}
_FLEX = "flex_attention"
_SPLIT = ("sdpa", "eager")
_WITH_MASKS = (*_SPLIT, _FLEX)


@dataclass(frozen=True)
class Mixers:
    """The modules in which tokens of a row meet, by FQN.

    ``attentions`` mix tokens by transformers' attention interface alone. ``why_not`` says why sequences can't be
    separated.
    """

    attentions: dict[str, nn.Module]
    others: dict[str, nn.Module]
    why_not: str | None = None


def find_mixers(model: Any) -> Mixers:
    """Find the mixers of a model, which may be on the meta device, by their forward's arguments."""
    interface, found, choosing = attention_modules(model), Mixers({}, {}), set[type]()
    for layer in decoder_layers(model):
        parts = {f"{layer}.{fqn}": m for fqn, m in model.get_submodule(layer).named_modules() if fqn}
        taking = {fqn: m for fqn, m in parts.items() if _OF_TOKENS & set(_parameters(m))}
        # Classes of attention with an indexer; some of their instances reuse another's choice.
        choosing |= {type(m) for fqn, m in taking.items() if any(_below(taking, fqn))}
        whole = {fqn for fqn, m in taking.items() if type(m) in choosing}
        attentions = {fqn: m for fqn, m in taking.items() if fqn in interface and fqn not in whole}
        others = {fqn: m for fqn, m in taking.items() if fqn not in attentions and not any(_below(attentions, fqn))}
        found.attentions.update(attentions)
        found.others.update((fqn, m) for fqn, m in others.items() if not any(fqn in _below(taking, o) for o in others))
        for fqn, module in parts.items():
            if isinstance(module, nn.Conv1d) and not any(fqn in _below(parts, other) for other in others):
                return Mixers({}, {}, f"a convolution mixes tokens in {fqn.rpartition('.')[0]}, which takes no mask")
    if not found.attentions and not found.others:
        return Mixers({}, {}, "no part of its layers takes a mask or a cache")
    return found


def why_not_packed(model: Any, attention: str) -> str | None:
    """Return why sequences packed into one row would see each other; None if they don't.

    The model may be on the meta device. ``attention`` is transformers' name of the attention to run.
    """
    mixers = find_mixers(model)
    if mixers.why_not is not None:
        return mixers.why_not
    if attention in _SPLIT:
        return None
    choosing = {type(m).__name__ for fqn, m in mixers.others.items() if fqn in attention_modules(model)}
    choosing |= {type(m).__name__ for m in mixers.attentions.values() if "flash" in attention and scales_by_index(m)}
    if choosing:
        return f"{' and '.join(sorted(choosing))} needs masks, which {attention} has none of"
    return UNPACKED_WITH_FLASH.get(model.config.get_text_config().model_type) if "flash" in attention else None


class PackedSequences:
    """Makes a model separate the sequences of a packed row; install it before anything else wraps its modules.

    From then on a forward without an attention mask finds its sequences in ``position_ids``, which restart with each:
    ``[1, S]``, or the first row of ``[4, 1, S]``. A forward with an attention mask is unchanged. For ``longest`` see
    ``embed_apart``.

    Raises:
        ValueError: the sequences can't be separated, see ``why_not_packed``.
    """

    running: ClassVar["PackedSequences | None"] = None
    """The instance whose model is in its forward: transformers' mask functions do not get the model."""

    def __init__(self, model: Any, longest: int = 0):
        name = model.config.get_text_config()._attn_implementation
        why = why_not_packed(model, name)
        if why is not None:
            raise ValueError(f"{type(model).__name__}: {why}.")
        self._mixers = find_mixers(model)
        self._spans: tuple[Span, ...] | None = None
        self._own: Sequence[Span] = ()  # spans in the row of the sequences that the other mixers get
        self._places: Sequence[Span] = ()  # their spans in the other mixers' input
        self.piece: Piece | None = None  # that one of the other mixers computes now
        self._calls = 0  # of each of the other mixers in this forward
        self._shared: SharedMixers | None = None
        self._arguments: dict[str, torch.Tensor] = {}
        self._lengths: Lengths | None = None
        self._taken = {fqn: lengths_taken(module) for fqn, module in self._mixers.others.items()}
        self._configured = name
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)
        if name in _WITH_MASKS:
            self._make_mask = ALL_MASK_ATTENTION_FUNCTIONS[name]
            for module in self._mixers.attentions.values():
                attach(module, name, lambda: self._spans, lambda: self._lengths)
            unattached = [m for fqn, m in attention_modules(model).items() if fqn not in self._mixers.attentions]
            _rename_attention(model, [*self._mixers.others.values(), *unattached])
        embed_apart(model, lambda: self._spans, longest)
        if "flash" in name:
            pass_lengths(name, self._mixers.attentions.values(), lambda: self._lengths)
        for fqn, module in self._mixers.others.items():
            call = functools.partial(self._call_mixer, module, self._taken[fqn])
            wrap_forward(module, "packed_sequences", torch.compiler.disable(call, recursive=False))

    @functools.cached_property
    def on_sequences(self) -> set[nn.Module]:
        """The modules that ranks which share a row call with whole sequences, and their parts."""
        return {part for mixer in self._mixers.others.values() for part in mixer.modules()}

    def share(self, group: dist.ProcessGroup, whole: bool = False) -> None:
        """From now on expect a slice of a row that ``group`` shares, with the positions of the whole row.

        For ``whole`` see ``SharedMixers``.
        """
        self._shared = SharedMixers(group, whole)

    def line(self) -> str:
        """Format how each kind of mixer is computed, for the log."""
        way = f"{self._configured} {'once per sequence' if self._configured in _SPLIT else 'of the row'}"
        if kernel := self._one_call(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
            way = f"the row by {kernel}'s kernel where it computes the same, else {way}"
        ways = {type(module).__name__: way for module in self._mixers.attentions.values()}
        for fqn, module in self._mixers.others.items():
            taken = self._taken[fqn]
            ways[type(module).__name__] = f"kernels that take {' and '.join(taken)}" if taken else "once per sequence"
        line = "packed rows: " + "; ".join(f"{name}: {way}" for name, way in sorted(ways.items()))
        if self._shared is None or not self._mixers.others:
            return line
        return f"{line}; {self._shared.line(list(self._mixers.others.values()))}"

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        PackedSequences.running = self
        self._spans, self._lengths = self._find(kwargs), None
        if self._spans is None:
            return
        device = kwargs["position_ids"].device
        self._own = self._spans if self._shared is None else self._shared.begin(self._spans, device)
        ends = list(itertools.accumulate(end - start for start, end in self._own))
        self._places = list(zip([0, *ends[:-1]], ends, strict=True))
        names = {name for taken in self._taken.values() for name in taken}
        self._arguments = {name: kernel_argument(name, self._places).to(device) for name in names}
        self._calls = self._agreed_calls(device)
        if "flash" in self._configured or self._one_call(device):
            self._lengths = lengths_of(self._spans, device)

    def _one_call(self, device: torch.device) -> str | None:
        """Return the kernel that computes whole rows in place of sdpa, or None."""
        return fastest(device) if self._configured == "sdpa" else None

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        PackedSequences.running = None  # a recomputation in backward makes no mask

    def _find(self, kwargs: dict[str, Any]) -> tuple[Span, ...] | None:
        positions = kwargs.get("position_ids")
        if positions is None or kwargs.get("attention_mask") is not None:
            return None
        needed = self._configured in _WITH_MASKS or bool(self._mixers.others)  # flash attention finds them itself
        if positions.dim() == 3 and positions.shape[0] != 4:
            if needed:
                raise ValueError("position_ids [3, 1, S] lack the first of four rows, which separates sequences.")
            return None
        positions = positions[0] if positions.dim() == 3 else positions
        if positions.shape[0] == 1:
            return spans_of(positions[0])
        if needed and (positions.diff(dim=-1) != 1).any():
            raise ValueError(f"packed sequences need one row of position_ids, and there are {positions.shape[0]}.")
        return None

    def _agreed_calls(self, device: torch.device) -> int:
        """Return the calls of each other mixer; equal on all ranks if FSDP gathers parts of it by calls."""
        calls = len(self._own)
        if not self._gathers_by_calls or not dist.is_initialized():
            return calls
        if self._shared is not None and self._shared.spreads:
            calls = max(calls, len(self._shared.pieces()))
        most = torch.tensor(calls, device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    @functools.cached_property
    def _gathers_by_calls(self) -> bool:
        inner = (part for m in self._mixers.others.values() for part in m.modules() if part is not m)
        return any(isinstance(part, FSDPModule) for part in inner)

    def mask(self, **asked: Any) -> Any:
        """Return the mask for the family's code: for a packed row a ``PackedMask``, or flex attention's mask."""
        if self._spans is None:
            return self._make_mask(**asked)
        if self._configured != _FLEX:
            return PackedMask(self._make_mask, eager_mask, asked)
        numbers = kernel_argument("seq_idx", self._spans).to(asked["device"])
        apart = packed_sequence_mask_function(numbers)  # some families do not add it
        length = self._spans[-1][1]
        asked |= {"mask_function": and_masks(asked["mask_function"], apart), "allow_is_causal_skip": False}
        return self._make_mask(**asked | {"q_length": length, "kv_length": length})

    def _call_mixer(
        self, module: nn.Module, taken: Sequence[str], forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if self._spans is None:
            return forward(*args, **kwargs)
        if self._shared is None:
            return self._per_sequence(taken, forward, *args, **kwargs)
        if self._shared.gathers_keys(module):
            args, kwargs = tree_map(self._shared.to_slice, (args, kwargs))
            name = "cache" if "cache" in _parameters(module) else "past_key_values"
            count = self._calls if self._gathers_by_calls else 0
            return self._on_pieces(self._shared.pieces(count), forward, args, kwargs, name)
        spread = self._shared.spread(module, forward, self._gathers_by_calls)
        if spread is None:
            call = functools.partial(self._per_sequence, taken, forward)
            return self._shared.on_sequences(call, args, kwargs)
        outputs = [spread(*args, **kwargs)]
        while self._gathers_by_calls and not taken and len(outputs) < self._calls:
            outputs.append(self._call_on(Piece((0, 1), (0, 1)), 0, forward, args, kwargs))  # as in ``_per_sequence``
        return outputs[0] if len(outputs) == 1 else _joined(outputs, [(0, 1)] + [None] * (len(outputs) - 1))

    def _per_sequence(self, taken: Sequence[str], forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        length, tokens = self._places[-1][1], _hidden(args, kwargs).shape[1]
        if tokens != length:
            raise ValueError(f"{tokens} tokens in a packed row of {length}.")
        if taken:
            return forward(*args, **kwargs, **{name: self._arguments[name] for name in taken})
        # Repeat the first token until there are as many calls as on the ranks with the most sequences.
        pieces = [Piece(*spans) for spans in zip(self._places, self._own, strict=True)]
        first = Piece((0, 1), (self._own[0][0], self._own[0][0] + 1), real=False)
        pieces += [first] * (self._calls - len(pieces))
        return self._on_pieces(pieces, forward, args, kwargs)

    def _on_pieces(
        self, pieces: Sequence[Piece], forward: Callable[..., Any], args: Any, kwargs: Any, cache: str = ""
    ) -> Any:
        """Call a mixer's forward on each piece and join the outputs; pieces' keys are the argument named ``cache``."""
        outputs = []
        for number, piece in enumerate(pieces):
            given = {**kwargs, cache: piece.keys} if cache else kwargs
            outputs.append(self._call_on(piece, number, forward, args, given))
        return _joined(outputs, [piece.place if piece.real else None for piece in pieces])

    def _call_on(self, piece: Piece, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a mixer's forward on one piece, the ``number``-th of its calls."""
        pick = functools.partial(_of_piece, piece, number, _hidden(args, kwargs).shape[1])
        args, kwargs = tree_map(pick, (args, kwargs))
        self.piece = piece
        try:
            return forward(*args, **kwargs)
        finally:
            self.piece = None


def lengths_taken(module: nn.Module) -> tuple[str, ...]:
    """Return the arguments by which a mixer's kernels get the sequences of a row; none if some kernel ignores them."""
    forward = inspect.unwrap(type(module).forward)
    code = forward.__globals__
    if not code.get("is_fast_path_available"):
        return ()
    read = {*_parameters(module), *(c for c in forward.__code__.co_consts if isinstance(c, str))}
    taken: dict[str, None] = {}
    for name, (parameter, argument) in _KERNELS.items():
        kernel = getattr(module, name, code.get(name))
        if kernel is None:
            continue
        if argument not in read or parameter not in inspect.signature(kernel).parameters:
            return ()
        taken[argument] = None
    return tuple(taken)


@dataclass
class _OfSequences:
    """Further outputs of a mixer, by call; the same call of a later layer's mixer gets its part."""

    parts: Sequence[Any]


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _of_piece(piece: Piece, number: int, length: int, value: Any) -> Any:
    """Return a piece's part of a mixer's argument, if its input has ``length`` tokens."""
    start, end = piece.place
    if isinstance(value, PackedMask):
        return value.of(piece.span, explicit=True, queries=piece.queries)
    if isinstance(value, _OfSequences):
        return value.parts[number]
    if isinstance(value, MutableMapping):  # keys that later layers share
        return value.setdefault(f"of sequence {number}", type(value)())
    if isinstance(value, Cache):
        return None  # a later sequence would continue from it
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == (length, length):  # distances between tokens
        return value[start:end, start:end]
    if value.dim() > 1 and value.shape[1] == length:
        value = value[:, start:end]
    elif value.dim() == 3 and value.shape[2] == length:  # rows of positions
        value = value[..., start:end]
    # A token that is not of the sequence takes the position of its first one.
    return value if piece.real or value.dtype != torch.int64 else torch.zeros_like(value)


def _joined(outputs: Sequence[Any], places: Sequence[Span | None]) -> Any:
    """Join the outputs of all calls into one row, by their places; outputs without one are multiplied by zero."""
    if isinstance(outputs[0], tuple):
        main, *besides = zip(*outputs, strict=True)
        others = (None if all(part is None for part in parts) else _OfSequences(parts) for parts in besides)
        return (_joined(main, places), *others)
    placed = {place: output for output, place in zip(outputs, places, strict=True) if place is not None}
    *before, last = (placed[place] for place in sorted(placed))
    for output, place in zip(outputs, places, strict=True):
        last = last + 0.0 * output.sum() if place is None else last
    return torch.cat([*before, last], dim=1)


def _rename_attention(model: Any, others: Iterable[nn.Module]) -> None:
    """Make the decoder look up ``NAME`` in transformers' interfaces, by configs of its own.

    Not in ``others``: GLM-MoE-DSA masks keys that it did not choose by the original name, and a module of Inkling2
    attends over a token's earlier states.
    """
    copies: dict[bool, dict[int, Any]] = {True: {}, False: {}}
    text, kept = type(model.config.get_text_config()), {part for other in others for part in other.modules()}
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config = copy.deepcopy(module.config, copies[module in kept])
            if type(module.config) is text and module not in kept:
                module.config._attn_implementation = NAME
    model.config.get_text_config()._attn_implementation = NAME


def _below(named: dict[str, Any], fqn: str) -> Iterator[str]:
    return (other for other in named if other.startswith(f"{fqn}."))


def _parameters(module: nn.Module) -> Any:
    return inspect.signature(type(module).forward).parameters


def _mask(**asked: Any) -> Any:
    if PackedSequences.running is None:
        raise RuntimeError("the decoder of a model with packed sequences was called without the model.")
    return PackedSequences.running.mask(**asked)


ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
