"""Count what autograd saves in a forward, by running the model's own code on the meta device.

Attention saves what a flash kernel saves (sdpa saves as much), and experts what ``moe/forward.py`` saves. All of it is
proportional to the tokens, so a few tokens are traced.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..compat.transformers_names import ALL_EXPERTS_FUNCTIONS
from ..fsdp.activation_checkpoint import units_recomputed
from ..model.layers import layer_names
from ..moe.dispatch import combine, dispatch
from ..moe.find import CustomExperts, UnsupportedModelError, find_experts
from ..moe.forward import linears
from ..moe.fused import on_tokens
from .backward_memory import BackwardPhase, SingleExpertBackend, backward_phases, local_dispatch_plan

__all__ = ["Attention", "LayerActivations", "Traced", "trace"]

_TOKENS = 64
_TRACED = "epfsdp2_traced"  # name of the attention and of the experts


@dataclass(frozen=True)
class Attention:
    """Elements per token of the inputs and the output of a layer's attention."""

    query: int = 0
    key: int = 0
    value: int = 0
    output: int = 0
    key_heads: int = 1

    def copies(self, sp: int) -> int:
        """Return how often keys and values are repeated so that each of ``sp`` ranks has those of its queries."""
        return math.lcm(self.key_heads, sp) // self.key_heads


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per token that a layer's forward saves for its backward.

    Args:
        input: the layer's input, which is all that full checkpointing saves.
        dense: saved outside the experts.
        experts: saved by the experts, dispatch and combine included; grows with the rows that a rank receives.
        sent: the part of ``experts`` that is not saved if one rank holds all experts: received rows, their weights and
            their orders.
        selective: the part of ``dense`` that selective checkpointing saves.
        recomputed: under selective checkpointing, saved by the largest part of the layer while it is recomputed.
        dispatched, local: the memory of the experts' backward, phase by phase, saved tensors included, for experts that
            receive rows and for experts that are all on one rank; empty without ``recompute_activations``.
        rows: rows per token that are dispatched; 0 without experts.
        row_width: elements of these rows together.
        ends_with_experts: whether nothing is saved after the experts, so that a recomputation of the layer ends before
            combine.
    """

    input: float
    dense: float
    experts: float
    selective: float
    recomputed: float
    sent: float = 0.0
    dispatched: tuple[BackwardPhase, ...] = ()
    local: tuple[BackwardPhase, ...] = ()
    rows: int = 0
    row_width: int = 0
    ends_with_experts: bool = False
    attention: Attention = Attention()


@dataclass(frozen=True)
class Traced:
    """The result of ``trace``; ``outside`` are bytes per token saved outside the layers (rotary, the head's input)."""

    layers: Mapping[str, LayerActivations]
    outside: float


def trace(model: Any, expert_plan: Mapping[str, int] | None = None, recompute_activations: bool = False) -> Traced:
    """Run a forward of a model on meta, in its compute dtype; moves its buffers to meta.

    Args:
        recompute_activations: whether the experts save only their input rows and the pre-activation and recompute the
            rest in backward, as ``moe/fused.py`` does.

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
    model.set_experts_implementation(_TRACED)
    layers = {name: model.get_submodule(name) for name in layer_names(model)}
    tape = _Tape(model, layers, experts, recompute_activations)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.enable_grad(), tape.recording(), _OneSequence():
            model(input_ids=ids, use_cache=False)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"the code of {type(model).__name__} can't be traced on the meta device: {error}"
        ) from error
    return tape.result()


class _Tape:
    """Records the storages that autograd saves, by the layer and the part of it that is running."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        experts: Sequence[nn.Module],
        recompute_activations: bool,
    ):
        self.layers, self.experts, self.recompute_activations = layers, experts, recompute_activations
        self.parts = units_recomputed(layers.values(), experts, "selective")
        self.seen: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no address is reused
        self.ignored = {self._key(p) for p in model.parameters()}
        self.layer: str | None = None
        self.part: nn.Module | None = None
        self.in_experts = False
        self.last: dict[str, bool] = {}  # whether the experts saved the last tensor of the layer
        self.saved: dict[str | None, dict[int, tuple[int, nn.Module | None, bool]]] = {None: {}}
        self.inputs: dict[str, int] = {}
        self.part_inputs: dict[str, dict[int, int]] = {}
        self.rows: dict[str, tuple[int, int]] = {}  # number per token, width of one
        self.sent: dict[str, int] = {}
        self.phases: dict[str, tuple[list[BackwardPhase], list[BackwardPhase]]] = {}
        self.cache: dict[Any, tuple[list[BackwardPhase], list[BackwardPhase]]] = {}
        self.attention: dict[str, Attention] = {}

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.seen.setdefault(key, storage)
        return key

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = self._key(tensor)
        if self.layer is not None:
            self.last[self.layer] = self.in_experts
        if key not in self.ignored and key not in self.saved[None]:
            size = self.seen[key].nbytes()
            self.saved[self.layer].setdefault(key, (size, self.part, self.in_experts))
        return tensor

    @contextmanager
    def recording(self) -> Iterator[None]:
        global _recording
        handles = []
        for name, layer in self.layers.items():
            handles.append(layer.register_forward_pre_hook(self._enter_layer(name), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave_layer))
        for part in self.parts:
            handles.append(part.register_forward_pre_hook(self._enter_part, with_kwargs=True))
            handles.append(part.register_forward_hook(self._leave_part))
        for module in self.experts:
            handles.append(module.register_forward_pre_hook(self._enter_experts))
            handles.append(module.register_forward_hook(self._leave_experts))
        _recording = self
        try:
            with saved_tensors_hooks(self.pack, lambda t: t):
                yield
        finally:
            _recording = None
            for handle in handles:
                handle.remove()

    def _enter_layer(self, name: str):
        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            first, *rest = [*_tensors(args), *_tensors(kwargs)]
            hidden = kwargs.get("hidden_states", first)
            for tensor in rest:  # inputs that all layers share are counted once
                if tensor is not hidden and tensor.is_floating_point():
                    key = self._key(tensor)
                    self.saved[None].setdefault(key, (self.seen[key].nbytes(), None, False))
            self.layer, self.saved[name], self.part_inputs[name] = name, {}, {}
            self.inputs[name] = hidden.untyped_storage().nbytes()

        return enter

    def _leave_layer(self, *_: Any) -> None:
        self.layer = None

    def _enter_part(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.layer is None:
            return
        for tensor in [*_tensors(args), *_tensors(kwargs)]:
            key = self._key(tensor)
            if key not in self.saved[None] and tensor.is_floating_point():
                self.part_inputs[self.layer][key] = self.seen[key].nbytes()
        self.part = module

    def _leave_part(self, *_: Any) -> None:
        self.part = None

    def _enter_experts(self, module: nn.Module, args: tuple) -> None:
        self.in_experts = True

    def _leave_experts(self, *_: Any) -> None:
        self.in_experts = False

    def backward_of(
        self, module: nn.Module, routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[list[BackwardPhase], list[BackwardPhase]]:
        """Return the phases with and without dispatch; cached for layers with equal experts."""
        weights = [(p.shape, p.requires_grad) for p in module.parameters()]
        key = (type(module), *weights, *((t.shape, t.dtype) for t in routed))
        if key not in self.cache:
            self.cache[key] = (
                backward_phases(module, *routed, all_here=False),
                backward_phases(module, *routed, all_here=True),
            )
        return self.cache[key]

    def result(self) -> Traced:
        return Traced(
            {name: self._layer(name) for name in self.layers if name in self.saved},
            sum(size for size, _, _ in self.saved[None].values()) / _TOKENS,
        )

    def _layer(self, name: str) -> LayerActivations:
        saved = self.saved[name]
        dense = {key: size for key, (size, _, inside) in saved.items() if not inside}
        kept = {key: size for key, (size, part, inside) in saved.items() if not inside and part is None}
        kept |= self.part_inputs[name]
        of_part: dict[nn.Module, int] = {}
        for size, part, _ in saved.values():
            if part is not None:
                of_part[part] = of_part.get(part, 0) + size
        dispatched, local = self.phases.get(name, ([], []))
        return LayerActivations(
            input=self.inputs[name] / _TOKENS,
            dense=sum(dense.values()) / _TOKENS,
            experts=sum(size for size, _, inside in saved.values() if inside) / _TOKENS,
            selective=sum(kept.values()) / _TOKENS,
            recomputed=max(of_part.values(), default=0) / _TOKENS,
            sent=self.sent.get(name, 0) / _TOKENS,
            dispatched=tuple(dispatched),
            local=tuple(local),
            rows=self.rows.get(name, (0, 0))[0],
            row_width=math.prod(self.rows.get(name, (0, 0))),
            ends_with_experts=self.recompute_activations and self.last.get(name, False),
            attention=self.attention.get(name, Attention()),
        )


_recording: _Tape | None = None


class _OneSequence(TorchFunctionMode):
    """Makes comparisons of positions true, which have no values on meta: the code of masks then sees one sequence."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


class _KeptByFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        batch, heads, length, _ = query.shape
        # Laid out as kernels do, so that o_proj reads it without a copy.
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


def _attention(module, query, key, value, attention_mask, **kwargs):
    _note_attention(query, key, value)
    return _KeptByFlash.apply(query, key, value).transpose(1, 2), None


def _note_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if _recording is not None and _recording.layer is not None:
        (_, heads, _, dim), keys, wide = query.shape, key.shape[1], value.shape[-1]
        sizes = Attention(heads * dim, keys * key.shape[-1], keys * wide, heads * wide, keys)
        _recording.attention[_recording.layer] = sizes


def _experts(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
    """Do what ``moe.forward.experts_forward`` does, with one expert's weights for all rows."""
    weight, tape = dict(self.named_parameters(recurse=False)), _recording
    down = weight["down_proj"]
    hidden, layer = hidden_states.to(down.dtype), None if tape is None else tape.layer
    if tape is not None and layer is not None:
        tape.rows[layer] = (top_k_index.shape[-1], hidden_states.shape[-1])
    if tape is None or not tape.recompute_activations:
        dispatched = dispatch(hidden, top_k_index, down.shape[0], None)
        out = combine(_compute(self, dispatched.rows_RD), dispatched, top_k_weights, None)
        return out.to(hidden_states.dtype)
    if layer is not None:
        # Rows, their weights, and their order.
        row_bytes = hidden.shape[-1] * hidden.element_size() + torch.float32.itemsize + torch.long.itemsize
        tape.sent[layer] = top_k_index.numel() * row_bytes
        tape.phases[layer] = tape.backward_of(self, (hidden_states, top_k_index, top_k_weights))
    plan = local_dispatch_plan(top_k_index, down.shape[0], all_here=False)
    return on_tokens(
        self, SingleExpertBackend(), *linears(self, weight), hidden, top_k_weights, plan, hidden_states.dtype
    )


def _compute(module: Any, rows: torch.Tensor) -> torch.Tensor:
    """Do what the reference backend of ``moe.forward.compute`` does, where autograd saves everything."""
    h = _expert_linear(module, rows, "gate_up_proj" if module.has_gate else "up_proj")
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    return _expert_linear(module, h, "down_proj")


def _expert_linear(module: Any, rows: torch.Tensor, name: str) -> torch.Tensor:
    weight = dict(module.named_parameters(recurse=False))

    def product(rows: torch.Tensor, name: str, is_transposed: bool) -> torch.Tensor:
        return rows @ (weight[name][0] if is_transposed else weight[name][0].t())

    out = product(rows, name, module.is_transposed)
    if f"{name}_bias" in weight:
        out = out + weight[f"{name}_bias"][0]
    if f"{name}_lora_A" in weight:
        out = out + product(product(rows, f"{name}_lora_A", False), f"{name}_lora_B", False)
    return out


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    items = values.values() if isinstance(values, dict) else values if isinstance(values, tuple | list) else ()
    return [tensor for item in items for tensor in _tensors(item)]


AttentionInterface.register(_TRACED, _attention)
AttentionMaskInterface.register(_TRACED, lambda *args, **kwargs: None)
ALL_EXPERTS_FUNCTIONS.register(_TRACED, _experts)
