"""Activation checkpointing that routes a token the same way when it is computed again.

Recomputing a router in another kernel, or after a reduction in another order, may flip near ties: the all-to-alls of
the recomputed layer would then have other sizes than those of the forward (NVIDIA-NeMo/Automodel#3156). So the ids that
``topk`` chose are kept from the forward, and a recomputation takes the scores at these ids. The plan of the dispatch is
kept too, which saves the recomputation an all-to-all, two sorts and a wait for the device.
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
_CACHES = ("past_key_value", "past_key_values", "layer_past")


def checkpoint_layers(
    layers: Iterable[nn.Module],
    experts: Iterable[nn.Module],
    num_experts: int,
    mode: Checkpointing,
    inputs_on_host: bool = False,
) -> None:
    """Have layers, or parts of them, computed again in backward instead of keeping their activations.

    Args:
        layers: without the last one of a forward: its backward comes first, when what it keeps would have to be there
            again.
        experts: the experts modules of the model.
        num_experts: the largest number of experts: a ``topk`` over more than these is no routing.
        mode: ``full`` recomputes each layer whole, dispatch and experts included; ``selective`` the parts of a layer
            that hold no experts (attention, norms, dense MLPs), so that no all-to-all runs twice.
        inputs_on_host: keep what goes into them, all that is kept under ``full``, in the host's memory.
    """
    host = HostInputs() if inputs_on_host else None
    for unit in units_recomputed(layers, experts, mode):
        wrap_forward(unit, "recompute", functools.partial(_recomputed, unit, num_experts, host))


def units_recomputed(layers: Iterable[nn.Module], experts: Iterable[nn.Module], mode: Checkpointing) -> list[nn.Module]:
    """Return the modules that are recomputed as a whole."""
    if mode == "none":
        return []
    if mode == "full":
        return list(layers)
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
    # A cache would be appended to a second time.
    kwargs = {name: None if name in _CACHES else value for name, value in kwargs.items()}
    if left := {name: value for name, value in kwargs.items() if isinstance(value, MutableMapping)}:
        forward = _as_at_first(left, forward)
    context = functools.partial(_routing_contexts, num_experts)
    if host is not None and not args:  # torch keeps keyword arguments as they are
        forward, args = _first_as("hidden_states", forward), (kwargs.pop("hidden_states"),)
    with host.holding(args[0]) if host is not None else nullcontext():
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=context,
            # To get and set the device's random state waits for it.
            preserve_rng_state=draws_numbers(module),
            **kwargs,
        )


def _as_at_first(left: dict[str, MutableMapping], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``forward`` get copies of mappings as they are now each time that it is computed again.

    A layer leaves keys and values in them for later layers (Gemma 4): the recomputation would find these there, which
    the guards of a compiled part tell from the forward.
    """
    now, calls = {name: copy.copy(value) for name, value in left.items()}, itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        again = {name: copy.copy(value) for name, value in now.items()} if next(calls) else {}
        return forward(*args, **(kwargs | again))

    return call


def _first_as(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda first, **kwargs: forward(**{name: first}, **kwargs)


def draws_numbers(module: nn.Module) -> bool:
    """Return whether a forward may draw random numbers, by the names of settings of the module and of its config.

    A rate of dropout is not zero (``attention_dropout``, ``resid_pdrop``), or a router has a setting of noise, whatever
    its value (``router_jitter_noise``): sparsemixer draws also where it is zero.
    """
    if module not in _draws:
        places = [place for part in module.modules() for place in (part, getattr(part, "config", None)) if place]
        rates = (vars(place).get("p", 0) if isinstance(place, _DROPOUTS) else _rates(place) for place in places)
        _draws[module] = any(rates)
    return _draws[module]


_draws: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


def _rates(place: Any) -> bool:
    return any(
        _NOISE.search(name) or ("drop" in name and isinstance(rate, float) and rate)
        for name, rate in vars(place).items()
    )


class HostInputs:
    """Holds what autograd saves of layers' inputs in the host's memory, and brings it back when backward asks for it.

    On an accelerator both ways go by a stream of their own. Backward asks for the inputs from the last to the first:
    with each, the one before it is started, so that it arrives while a layer computes.
    """

    def __init__(self) -> None:
        self._last: Callable[[], _Held | None] = lambda: None
        self._stream: Any = None

    def holding(self, hidden: torch.Tensor) -> AbstractContextManager:
        """Hold ``hidden`` on the host where autograd saves it inside."""
        address, shape = hidden.data_ptr(), hidden.shape  # hooks live as long as what they saved

        def pack(saved: torch.Tensor) -> "torch.Tensor | _Held":
            if saved.data_ptr() != address or saved.shape != shape:
                return saved
            held = _Held(saved, self._own_stream(saved.device), self._last)
            self._last = weakref.ref(held)
            return held

        def unpack(packed: "torch.Tensor | _Held") -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else packed.back()

        return saved_tensors_hooks(pack, unpack)

    def _own_stream(self, device: torch.device) -> Any:
        if self._stream is None and device.type != "cpu":
            self._stream = torch.get_device_module(device).Stream(device)
        return self._stream


class _Held:
    """One input on the host.

    Args:
        stream: that copies; None on a CPU, where copies are done when they return.
        before: returns the input that was saved before this one, if it is still held.
    """

    def __init__(self, saved: torch.Tensor, stream: Any, before: "Callable[[], _Held | None]"):
        self._device, self._stream, self._before = saved.device, stream, before
        self._arriving: torch.Tensor | None = None
        self._host = _empty_on_host(saved, pinned=stream is not None)
        with self._after_what_was_launched():
            self._host.copy_(saved, non_blocking=True)
            if stream is not None:
                saved.record_stream(stream)  # it is freed before the copy has run

    def back(self) -> torch.Tensor:
        """Return the input on its device, and start to bring the one before it."""
        arrived, self._arriving = self.start(), None
        if self._stream is not None:
            self._module().current_stream(self._device).wait_stream(self._stream)
            if (before := self._before()) is not None:
                before.start()
        return arrived

    def start(self) -> torch.Tensor:
        """Start to bring it to its device, unless it is on its way."""
        if self._arriving is None:
            # Allocated on the stream that computes, which waits for the copy before it reads, and frees it afterwards.
            self._arriving = torch.empty_like(self._host, device=self._device, pin_memory=False)
            with self._after_what_was_launched():
                self._arriving.copy_(self._host, non_blocking=True)
        return self._arriving

    @contextmanager
    def _after_what_was_launched(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module().current_stream(self._device))
        with self._module().stream(self._stream):
            yield

    def _module(self) -> Any:
        return torch.get_device_module(self._device)


def _empty_on_host(like: torch.Tensor, pinned: bool) -> torch.Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=pinned)


def _routing_contexts(num_experts: int) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of one checkpointed call: that of its forward, and that of its recomputation."""
    tape: list[torch.Tensor] = []
    plans: list[list[DispatchPlan]] = []
    return _KeepRouting(tape, plans, num_experts, replay=False), _KeepRouting(tape, plans, num_experts, replay=True)


class _KeepRouting(RoutingMode):
    """Records the ids of each routing ``topk`` and the plans of dispatch, or returns them again in the same order."""

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
        # Taken in the same way both times, so that autograd keeps the same tensors.
        if self.replay:
            self.next += 1
            return self.tape[self.next - 1].long()
        ids = native()
        self.tape.append(ids.to(torch.int16) if scores.shape[dim] < 2**15 else ids)
        return ids
