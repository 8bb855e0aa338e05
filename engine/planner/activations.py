"""Count what autograd saves in a forward, by running the model's own code on the meta device.

Attention saves what a flash kernel saves (sdpa saves as much), and experts what ``moe/fused.py`` saves. All of it is
proportional to the tokens, so a few tokens are traced.

It also counts the bytes that a layer's operators read and write in forward and backward. They give the time of eager
operators and fused kernels, which are bound by memory. Matrix products, attention and experts are left out, because
the roofline has formulas for them.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..compat.transformers_names import ALL_EXPERTS_FUNCTIONS, set_experts_implementation
from ..dense.fuse import fused_on_meta
from ..fsdp.activation_checkpoint import Checkpointing, units_recomputed
from ..model.layers import layer_names
from ..moe.find import CustomExperts, UnsupportedModelError, find_experts
from ..moe.forward import linears
from ..moe.gemm.backends import MOST_BY_INDEX
from ..moe.gemm.gate import gate_of

__all__ = ["Attention", "CountedPasses", "LayerActivations", "Traced", "backward_of", "trace"]

_TOKENS = 64
_TRACED = "epfsdp2_traced"  # name of the attention and of the experts
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_MOVE_NOTHING = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view")


class CountedPasses(TorchDispatchMode):
    """Sums the bytes that operators read and write in ``nbytes``; an expanded tensor counts its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in _PRODUCTS + _MOVE_NOTHING:
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.nbytes += sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)
        return out


def backward_of(outputs: Any, inputs: list[torch.Tensor]) -> None:
    """Run the backward of a layer on meta, from gradients of all outputs to gradients of inputs and weights."""
    reached = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in inputs if t.requires_grad]
    if reached and leaves:
        torch.autograd.grad(reached, leaves, [torch.empty_like(t) for t in reached], allow_unused=True)


@dataclass(frozen=True)
class Attention:
    """Elements per token of the inputs and the output of a layer's attention."""

    query: int = 0
    key: int = 0
    value: int = 0
    output: int = 0
    key_heads: int = 1

    def copies(self, sp: int) -> int:
        """Return how often keys and values are repeated so that each of ``sp`` ranks has them for its queries."""
        return math.lcm(self.key_heads, sp) // self.key_heads


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per token that a layer's forward saves for its backward.

    ``backward`` is the maximum in backward besides saved tensors and gradients of weights. It is the experts' with
    torch's operators, which grows with the received rows, or the layer's if it has no experts. ``backward_by_index`` is
    the same with the Triton kernels, which read rows through an index; gradients of received rows add ``row_width``.
    """

    input: float  # the layer's input, which is all that full checkpointing saves
    dense: float  # saved outside the experts
    selective: float  # the part of dense that selective checkpointing saves
    recomputed: float  # saved by the largest part of the layer while selective checkpointing recomputes it
    experts: float = 0.0  # saved by the experts, dispatch and combine included; grows with the rows of a rank
    sent: float = 0.0  # the part of experts for received rows, their weights and orders: none if ep * etp is 1
    backward: float = 0.0
    backward_by_index: float = 0.0
    rows: int = 0  # rows per token that are dispatched; 0 without experts
    row_width: int = 0  # elements of these rows together,
    pre_width: int = 0  # of their first linear's output,
    act_width: int = 0  # and of their activation
    ends_with_experts: bool = False  # nothing is saved after the experts, so a recomputation ends before combine
    passes: float = 0.0  # read and written by operators other than matrix products, attention and experts
    passes_backward: float = 0.0
    attention: Attention = Attention()


@dataclass(frozen=True)
class Traced:
    """The result of ``trace``; ``outside`` are bytes per token saved outside the layers (rotary, the head's input)."""

    layers: dict[str, LayerActivations]
    outside: float

    def checkpointing(self, layer: str, mode: Checkpointing) -> Checkpointing:
        """Return how a layer is recomputed: the last one is not (``parallelize``)."""
        return "none" if layer == next(reversed(self.layers), None) else mode


def trace(
    model: Any,
    expert_plan: Mapping[str, int] | None = None,
    recompute_activations: bool = False,
    fuse_dense: bool = False,
) -> Traced:
    """Run a forward of a model on meta, in its compute dtype; moves its buffers to meta.

    Args:
        recompute_activations: whether the experts save only their input rows and the pre-activation and recompute the
            rest in backward, as ``moe/fused.py`` does.
        fuse_dense: whether norms and rotary embeddings are fused; the model's norms stay so.

    Raises:
        UnsupportedModelError: its code can't run on meta, or it has custom experts.
    """
    experts = [info.module for info in find_experts(model, expert_plan)]
    if any(isinstance(module, CustomExperts) for module in experts):
        raise UnsupportedModelError(
            f"{type(model).__name__} has experts that compute themselves, so it is not known what they save."
        )
    model.eval()._apply(lambda t: t if t.is_meta else t.to("meta"))
    model.tie_weights()
    model.set_attn_implementation(_TRACED)
    set_experts_implementation(model, experts, _TRACED)
    layers = {name: model.get_submodule(name) for name in layer_names(model)}
    parts = units_recomputed(layers.values(), experts, "selective")
    try:
        with fused_on_meta(model) if fuse_dense else nullcontext():
            tape, longer = (_Tape(model, recompute_activations) for _ in range(2))
            tape.record(model, layers, parts, _TOKENS)
            longer.record(model, layers, parts, 2 * _TOKENS)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        kind = type(model).__name__
        raise UnsupportedModelError(f"the code of {kind} can't be traced on the meta device: {error}") from error
    return Traced(
        {name: layer.result(recompute_activations, longer.layers[name]) for name, layer in tape.layers.items()},
        sum(tape.outside.values()) / _TOKENS,
    )


@dataclass
class _Layer:
    """Bytes of the storages that autograd saves in a layer, by the part of the layer that saves them.

    The experts' part is ``"experts"``; None is the layer's own code.
    """

    input: int
    saved: dict[int, tuple[int, object]] = field(default_factory=dict)
    part_inputs: dict[int, int] = field(default_factory=dict)
    last: object = None  # the part that saved last
    facts: dict[str, Any] = field(default_factory=dict)  # fields of LayerActivations that need no sum
    passes: tuple[CountedPasses, CountedPasses] = field(default_factory=lambda: (CountedPasses(), CountedPasses()))

    def result(self, recompute_activations: bool, longer: "_Layer") -> LayerActivations:
        """Return the sums; ``longer``, a run with twice the tokens, separates passes over weights from the rest."""
        by_part: dict[object, int] = {}
        for size, part in self.saved.values():
            by_part[part] = by_part.get(part, 0) + size
        experts = by_part.pop("experts", 0)
        # Gradients of the output and the input of the function that saves most.
        backward = 2 * max((size for size, _ in self.saved.values()), default=0) / _TOKENS
        kept = {key: size for key, (size, part) in self.saved.items() if part is None} | self.part_inputs
        passes, passes_backward = (
            (long.nbytes - short.nbytes) / _TOKENS for long, short in zip(longer.passes, self.passes, strict=True)
        )
        return LayerActivations(
            input=self.input / _TOKENS,
            dense=sum(by_part.values()) / _TOKENS,
            selective=sum(kept.values()) / _TOKENS,
            recomputed=max((size for part, size in by_part.items() if part is not None), default=0) / _TOKENS,
            experts=experts / _TOKENS,
            ends_with_experts=recompute_activations and self.last == "experts",
            passes=passes,
            passes_backward=passes_backward,
            **{"backward": backward, **self.facts},
        )


class _Tape:
    """Records the storages that autograd saves, by the layer and the part of it that is running."""

    def __init__(self, model: nn.Module, recompute_activations: bool):
        self.recompute_activations = recompute_activations
        self.storages: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no address is reused
        self.weights = {self.key(p) for p in model.parameters()}
        self.layers: dict[str, _Layer] = {}
        self.outside: dict[int, int] = {}
        self.layer: _Layer | None = None
        self.part: object = None
        self.kinds: dict[tuple, tuple[CountedPasses, CountedPasses]] = {}  # counted in the first layer of each kind
        self.input: torch.Tensor | None = None  # input of the running layer, if it is the first of its kind
        self.counting = ExitStack()  # counts while that layer runs

    def key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        return self.storages.setdefault(storage._cdata, storage)._cdata

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = self.key(tensor)
        if self.layer is not None:
            self.layer.last = self.part
        if key not in self.weights and key not in self.outside:
            size = self.storages[key].nbytes()
            if self.layer is None:
                self.outside[key] = size
            else:
                self.layer.saved.setdefault(key, (size, self.part))
        return tensor

    def record(self, model: Any, layers: Mapping[str, nn.Module], parts: list[nn.Module], tokens: int) -> None:
        """Run a forward, and the backward of the first layer of each kind."""
        global _tape
        ids, handles = torch.zeros(1, tokens, dtype=torch.long, device="meta"), []
        for name, layer in layers.items():
            handles.append(layer.register_forward_pre_hook(partial(self._enter_layer, name), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave_layer))
        for part in parts:
            handles.append(part.register_forward_pre_hook(self._enter_part, with_kwargs=True))
            handles.append(part.register_forward_hook(lambda *_: setattr(self, "part", None)))
        _tape = self
        try:
            with torch.enable_grad(), saved_tensors_hooks(self.pack, lambda t: t), _OneSequence():
                model(input_ids=ids, use_cache=False)
        finally:
            _tape = None
            self.counting.close()
            for handle in handles:
                handle.remove()

    def _enter_layer(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        inputs = _floating(args, kwargs)
        hidden = kwargs.get("hidden_states", inputs[0])
        for tensor in inputs:  # inputs that all layers share are counted once
            if tensor is not hidden:
                self.outside.setdefault(self.key(tensor), tensor.untyped_storage().nbytes())
        self.layer = self.layers[name] = _Layer(hidden.untyped_storage().nbytes())
        kind = tuple((type(m), *(p.shape for p in m.parameters(recurse=False))) for m in module.modules())
        if kind in self.kinds:
            self.layer.passes = self.kinds[kind]
            return args, kwargs
        self.kinds[kind] = self.layer.passes
        self.input = hidden.detach().requires_grad_(hidden.requires_grad)
        self.counting.enter_context(self.layer.passes[0])
        return tree_map(lambda t: self.input if t is hidden else t, (args, kwargs))

    def _leave_layer(self, module: nn.Module, args: tuple, output: Any) -> None:
        assert self.layer is not None
        (_, backward), self.layer = self.layer.passes, None
        self.counting.close()
        if self.input is not None:
            with backward:
                backward_of(output, [self.input, *module.parameters()])
            self.input = None

    def _enter_part(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.layer is None:
            return
        for tensor in _floating(args, kwargs):
            if self.key(tensor) not in self.outside:
                self.layer.part_inputs[self.key(tensor)] = tensor.untyped_storage().nbytes()
        self.part = module


_tape: _Tape | None = None  # the tape that records


class _OneSequence(TorchFunctionMode):
    """Makes comparisons of positions true, because meta has no values; masks are then built for one sequence."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


class _Saves(torch.autograd.Function):
    """Returns ``out`` as if it was computed from ``sources``, and saves ``kept``."""

    @staticmethod
    def forward(ctx, out, kept, *sources):
        ctx.save_for_backward(*kept)
        ctx.sources = [(source.shape, source.stride(), source.dtype) for source in sources]
        return out

    @staticmethod
    def backward(ctx, grad):
        return None, None, *(grad.new_empty_strided(*sizes, dtype=dtype) for *sizes, dtype in ctx.sources)


def _attention(module, query, key, value, attention_mask, **kwargs):
    (batch, heads, length, dim), keys, wide = query.shape, key.shape[1], value.shape[-1]
    if _tape is not None and _tape.layer is not None:
        sizes = Attention(heads * dim, keys * key.shape[-1], keys * wide, heads * wide, keys)
        _tape.layer.facts["attention"] = sizes
    out = query.new_empty(batch, length, heads, wide)  # as kernels lay it out, so that o_proj reads it without a copy
    log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return _Saves.apply(out, (query, key, value, out, log_sums), query, key, value), None


def _mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a mask, which attention that chooses its keys combines with its choice."""
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")


def _experts(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
    """Save the tensors of ``moe/fused.py``, or all of autograd's with the reference backend."""
    tape = _tape
    assert tape is not None
    up, down = linears(self, dict(self.named_parameters(recurse=False)))
    (wide, wide_pre), wide_act = up.in_out.shape[1:], down.in_out.shape[1]
    tokens, k = top_k_index.shape
    rows = down.weight.new_empty(tokens * k, wide)
    pre = rows.new_empty(len(rows), wide_pre).requires_grad_()
    weights = rows.new_empty(len(rows), dtype=torch.float32)
    slot_order, row_order = (weights.new_empty(len(rows), dtype=torch.long) for _ in range(2))
    by_gate: dict[int, torch.Tensor] = {pre.untyped_storage()._cdata: pre}
    counted = tape.layer.passes[0] if tape.layer is not None else CountedPasses()
    passes = counted.nbytes
    with saved_tensors_hooks(lambda t: by_gate.setdefault(t.untyped_storage()._cdata, t), lambda t: t):
        act = self._apply_gate(pre) if self.has_gate else self.act_fn(pre)
    kept = [rows, pre, weights, slot_order, row_order]
    if not tape.recompute_activations:
        kept += [*by_gate.values(), act, rows.new_empty(rows.shape)]
    if tape.layer is not None:
        # The gradient of the output's rows is there throughout. The activation's backward also holds its saved tensors,
        # output and gradient. It adds its input's gradient and a part of it, or two float32 tensors for the gradient of
        # the routing weights. The first linear's backward holds the gradients of its output and of the rows instead.
        # A kernel needs only the activation's input gradient and its output, which replaces the output's gradient.
        element = rows.element_size()
        adapted = up.lora_A is not None or down.lora_A is not None  # whose activation is not computed in the GEMM
        has_kernel = tape.recompute_activations and not adapted and gate_of(self) is not None
        of_gate = sum(t.untyped_storage().nbytes() for t in by_gate.values() if t is not pre) / len(rows)
        of_gate += 2 * wide_act * element + max((wide_pre + wide_act) * element, 2 * wide_act * torch.float32.itemsize)
        of_first = wide + wide_pre
        backward = k * (wide * element + max(of_gate, of_first * element))
        copied = wide if wide_act > MOST_BY_INDEX else 0
        by_index = k * element * max(of_first, wide_act + wide_pre + copied)
        tape.layer.facts |= {
            "sent": sum(t.nbytes for t in (rows, weights, row_order)) / tokens if tape.recompute_activations else 0,
            "backward": backward,
            "backward_by_index": by_index if has_kernel else backward,
            "rows": k,
            "row_width": k * wide,
            "pre_width": k * wide_pre,
            "act_width": k * wide_act,
        }
    counted.nbytes = passes  # the gate is a part of the experts
    before, tape.part = tape.part, "experts"
    out = _Saves.apply(torch.empty_like(hidden_states), kept, hidden_states, top_k_weights)
    tape.part = before
    return out


def _floating(*values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.is_floating_point()]


AttentionInterface.register(_TRACED, _attention)
AttentionMaskInterface.register(_TRACED, _mask)
ALL_EXPERTS_FUNCTIONS.register(_TRACED, _experts)
