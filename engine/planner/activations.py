"""What autograd keeps of a forward, counted on the meta device: the model's own code runs, and nothing is computed.

Attention keeps what a flash kernel keeps (sdpa keeps as much), and experts what ``moe/forward.py`` keeps. All of it
grows with the tokens, so a few are traced.
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
    """Elements per token of what goes in and out of a layer's attention."""

    query: int = 0
    key: int = 0
    value: int = 0
    output: int = 0
    key_heads: int = 1

    def copies(self, sp: int) -> int:
        """How often keys and values are repeated, so that each of ``sp`` ranks has those of its queries."""
        return math.lcm(self.key_heads, sp) // self.key_heads


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per token that a layer's forward leaves for its backward.

    Args:
        input: what goes in, all that full checkpointing keeps.
        dense: kept outside the experts.
        experts: kept by the experts, dispatch and combine included; grows with the rows that a rank is sent.
        sent: of ``experts``, what is not kept where one rank holds all experts: rows that are sent to them, their
            weights and their orders.
        selective: of ``dense``, kept under selective checkpointing.
        recomputed: under selective checkpointing, of the part that keeps most while it is computed again.
        dispatched, local: of the backward of experts that rows are sent to, and of experts that are all on one rank,
            what they hold at once, phase by phase, what they kept included; empty where they are not recompute_activations.
        rows: that each token becomes when it is dispatched; 0 without experts.
        row_width: elements of these rows together.
        ends_with_experts: nothing is kept after the experts, so a layer that is computed again is done before what they
            give comes home.
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
    """``outside``: bytes per token that are kept outside the layers (rotary frequencies, the head's input)."""

    layers: Mapping[str, LayerActivations]
    outside: float


def trace(model: Any, expert_plan: Mapping[str, int] | None = None, recompute_activations: bool = False) -> Traced:
    """Run a forward of a model on meta, in the dtype that it computes in; its buffers go to meta.

    Args:
        recompute_activations: the experts keep what they are sent and what comes out of their first linear, and compute the rest again.

    Raises:
        UnsupportedModelError: its code can't run on meta, or its experts compute themselves.
    """
    experts = [info.module for info in find_experts(model, expert_plan)]
    if any(isinstance(module, CustomExperts) for module in experts):
        raise UnsupportedModelError(
            f"{type(model).__name__} has experts that compute themselves: what they keep is not known."
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
            f"the code of {type(model).__name__} can't be traced without data: {error}"
        ) from error
    return tape.result()


class _Tape:
    """Storages that autograd saves, by the layer and the part of it that was running."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        experts: Sequence[nn.Module],
        recompute_activations: bool,
    ):
        self.layers, self.experts, self.recompute_activations = layers, experts, recompute_activations
        self.parts = units_recomputed(layers.values(), experts, "selective")
        self.seen: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes twice
        self.passed_over = {self._key(p) for p in model.parameters()}
        self.layer: str | None = None
        self.part: nn.Module | None = None
        self.in_experts = False
        self.last: dict[str, bool] = {}  # of what is saved, whether the last is the experts'
        self.saved: dict[str | None, dict[int, tuple[int, nn.Module | None, bool]]] = {None: {}}
        self.inputs: dict[str, int] = {}
        self.part_inputs: dict[str, dict[int, int]] = {}
        self.rows: dict[str, tuple[int, int]] = {}  # number per token, width of one
        self.sent: dict[str, int] = {}
        self.phases: dict[str, tuple[list[BackwardPhase], list[BackwardPhase]]] = {}
        self.alike: dict[Any, tuple[list[BackwardPhase], list[BackwardPhase]]] = {}
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
        if key not in self.passed_over and key not in self.saved[None]:
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
            for tensor in rest:  # what all layers are handed is theirs together
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
        """Of experts that rows are sent to, and of experts that are all here; once for all layers that are alike."""
        weights = [(p.shape, p.requires_grad) for p in module.parameters()]
        key = (type(module), *weights, *((t.shape, t.dtype) for t in routed))
        if key not in self.alike:
            self.alike[key] = (
                backward_phases(module, *routed, all_here=False),
                backward_phases(module, *routed, all_here=True),
            )
        return self.alike[key]

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
    """Answers what the masks' code asks of positions, which have no values here: they are those of one sequence."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


class _KeptByFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        batch, heads, length, _ = query.shape
        # As kernels do: o_proj then reads it without a copy.
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
    """As ``moe.forward.experts_forward``, with one expert's weights for all rows."""
    weight, tape = dict(self.named_parameters(recurse=False)), _recording
    down = weight["down_proj"]
    hidden, layer = hidden_states.to(down.dtype), None if tape is None else tape.layer
    if tape is not None and layer is not None:
        tape.rows[layer] = (top_k_index.shape[-1], hidden_states.shape[-1])
    if tape is None or not tape.recompute_activations:
        sent = dispatch(hidden, top_k_index, down.shape[0], None)
        out = combine(_compute(self, sent.rows_RD), sent, top_k_weights, None)
        return out.to(hidden_states.dtype)
    if layer is not None:
        # Rows, their weights, and their order.
        row_bytes = hidden.shape[-1] * hidden.element_size() + torch.float32.itemsize + torch.long.itemsize
        tape.sent[layer] = top_k_index.numel() * row_bytes
        tape.phases[layer] = tape.backward_of(self, (hidden_states, top_k_index, top_k_weights))
    route = local_dispatch_plan(top_k_index, down.shape[0], all_here=False)
    return on_tokens(
        self, SingleExpertBackend(), *linears(self, weight), hidden, top_k_weights, route, hidden_states.dtype
    )


def _compute(module: Any, rows: torch.Tensor) -> torch.Tensor:
    """As ``moe.forward.compute``: autograd keeps what it likes."""
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
