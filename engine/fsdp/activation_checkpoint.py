"""Activation checkpointing whose recomputation routes each token as the forward did.

Recomputing a router in another kernel, or after a reduction in another order, may flip near ties. The recomputed
layer's all-to-alls then have other sizes than the forward's (NVIDIA-NeMo/Automodel#3156). So the forward's ``topk`` ids
are kept, and a recomputation uses the scores at these ids. The dispatch plan is kept too, which saves the recomputation
an all-to-all, two sorts and a wait for the device.
"""

import copy
import functools
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..moe.dispatch import DispatchPlan, keep_plans
from ..moe.router.override import RoutingMode
from ..wrap_forward import wrap_forward

__all__ = ["CHECKPOINTING", "Checkpointing", "checkpoint_layers", "units_recomputed"]

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
_NOISE = re.compile("jitter|noise")
_CACHES = ("cache", "past_key_value", "past_key_values", "layer_past")


def checkpoint_layers(
    layers: Iterable[nn.Module],
    experts: Iterable[nn.Module],
    num_experts: int,
    mode: Checkpointing,
    inputs_on_host: bool = False,
) -> None:
    """Recompute layers, or parts of them, in backward instead of keeping their activations.

    Args:
        layers: without the last one of a forward, whose backward runs first: recomputing it saves no memory.
        num_experts: the largest number of experts; a ``topk`` over more is no routing.
        mode: ``full`` recomputes each layer whole, dispatch and experts included; ``selective`` the parts of a layer
            without experts (attention, norms, dense MLPs), so that no all-to-all runs twice.
        inputs_on_host: keep the inputs of recomputed layers, the only activations under ``full``, in host memory.
    """
    host = HostInputs() if inputs_on_host else None
    for unit in units_recomputed(layers, experts, mode):
        wrap_forward(unit, "recompute", functools.partial(_recomputed, unit, num_experts, host))


def units_recomputed(layers: Iterable[nn.Module], experts: Iterable[nn.Module], mode: Checkpointing) -> list[nn.Module]:
    """Return the modules that are recomputed as a whole."""
    if mode != "selective":
        return list(layers) if mode == "full" else []
    holding = set(experts)
    parts = [child for layer in layers for child in layer.children()]
    return [part for part in parts if not holding & set(part.modules()) and any(True for _ in part.parameters())]


def _recomputed(
    module: nn.Module,
    num_experts: int,
    host: "HostInputs | None",
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    # A recomputation would append to a cache a second time.
    kwargs = {name: None if name in _CACHES else value for name, value in kwargs.items()}
    if mappings := {name: value for name, value in kwargs.items() if isinstance(value, MutableMapping)}:
        forward = _with_first_mappings(mappings, forward)
    if host is not None and not args:  # torch saves only positional arguments by hooks
        of_keywords, args = forward, (kwargs.pop("hidden_states"),)
        forward = lambda hidden, **kwargs: of_keywords(hidden_states=hidden, **kwargs)  # noqa: E731
    with host.holding(args[0]) if host is not None else nullcontext():
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=functools.partial(_routing_contexts, num_experts),
            preserve_rng_state=draws_numbers(module),  # reading and writing the random state waits for the device
            **kwargs,
        )


def _with_first_mappings(mappings: dict[str, MutableMapping], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Pass each recomputation copies of the mappings as they are now.

    A layer writes keys and values into them (Gemma 4), which would trip the guards of a compiled part.
    """
    now, calls = {name: copy.copy(value) for name, value in mappings.items()}, itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        again = {name: copy.copy(value) for name, value in now.items()} if next(calls) else {}
        return forward(*args, **(kwargs | again))

    return call


def draws_numbers(module: nn.Module) -> bool:
    """Return whether a forward may draw random numbers, judged by settings of the modules and their configs.

    It may if a dropout rate is not zero (``attention_dropout``, ``resid_pdrop``). It may with any setting of router
    noise (``router_jitter_noise``), because sparsemixer draws even if it is zero.
    """
    if module not in _draws:
        parts = list(module.modules())
        settings = [vars(place) for part in parts for place in (part, getattr(part, "config", None)) if place]
        settings += [{"drop": float(part.p)} for part in parts if isinstance(part, nn.modules.dropout._DropoutNd)]
        _draws[module] = any(
            _NOISE.search(name) or ("drop" in name and isinstance(rate, float) and rate)
            for each in settings
            for name, rate in each.items()
        )
    return _draws[module]


_draws: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


class HostInputs:
    """Offloads the layer inputs that autograd saves to host memory.

    On an accelerator a stream of its own copies both ways. In backward the copy of the input before starts with each
    input, so that it arrives while a layer computes.
    """

    def __init__(self) -> None:
        self._last: Callable[[], _Held | None] = lambda: None
        self._stream: Any = None

    def holding(self, hidden: torch.Tensor) -> AbstractContextManager:
        """Offload ``hidden`` if autograd saves it inside this context."""
        address, shape = hidden.data_ptr(), hidden.shape  # not ``hidden``: hooks live as long as the saved tensors

        def pack(saved: torch.Tensor) -> "torch.Tensor | _Held":
            if saved.data_ptr() != address or saved.shape != shape:
                return saved
            if self._stream is None and saved.device.type != "cpu":
                self._stream = torch.get_device_module(saved.device).Stream(saved.device)
            held = _Held(saved, self._stream, self._last)
            self._last = weakref.ref(held)
            return held

        return saved_tensors_hooks(pack, lambda packed: packed.back() if isinstance(packed, _Held) else packed)


class _Held:
    """One input on the host, copied by ``stream`` if there is one; ``before`` returns the input saved before it."""

    def __init__(self, saved: torch.Tensor, stream: Any, before: "Callable[[], _Held | None]"):
        self._device, self._stream, self._before = saved.device, stream, before
        self._arriving: torch.Tensor | None = None
        self._host = _empty_on_host(saved, pinned=stream is not None)
        with self._on_stream():
            self._host.copy_(saved, non_blocking=True)
            if stream is not None:
                saved.record_stream(stream)  # it is freed before the copy has run

    def back(self) -> torch.Tensor:
        """Return the input on its device, and start the copy of the one before."""
        arrived, self._arriving = self.start(), None
        if self._stream is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_stream(self._stream)
            if (before := self._before()) is not None:
                before.start()
        return arrived

    def start(self) -> torch.Tensor:
        """Start the copy to the device, once."""
        if self._arriving is None:
            # Allocated on the compute stream, which waits for the copy before it reads, and frees it afterwards.
            self._arriving = torch.empty_like(self._host, device=self._device, pin_memory=False)
            with self._on_stream():
                self._arriving.copy_(self._host, non_blocking=True)
        return self._arriving

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        module = torch.get_device_module(self._device)
        self._stream.wait_stream(module.current_stream(self._device))
        with module.stream(self._stream):
            yield


def _empty_on_host(like: torch.Tensor, pinned: bool) -> torch.Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=pinned)


def _routing_contexts(num_experts: int) -> tuple["_KeepRouting", "_KeepRouting"]:
    """Return the contexts of one checkpointed call: for its forward, and for its recomputation."""
    tapes: tuple[list[torch.Tensor], list[list[DispatchPlan]]] = [], []
    return _KeepRouting(*tapes, num_experts, replay=False), _KeepRouting(*tapes, num_experts, replay=True)


class _KeepRouting(RoutingMode):
    """Records the ids of each routing ``topk`` and the dispatch plans, or replays them in the same order."""

    def __init__(self, tape: list[torch.Tensor], plans: list[list[DispatchPlan]], num_experts: int, replay: bool):
        super().__init__(num_experts)
        self.tape, self.plans, self.replay = tape, plans, replay

    def __enter__(self):
        self.next, self.keeping = 0, keep_plans(self.plans, self.replay)
        self.keeping.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        self.keeping.__exit__(None, None, None)
        return super().__exit__(*error)

    def choose(self, scores: torch.Tensor, dim: int, native: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.replay:
            self.next += 1
            return self.tape[self.next - 1].long()
        ids = native()
        self.tape.append(ids.to(torch.int16) if scores.shape[dim] < 2**15 else ids)
        return ids
