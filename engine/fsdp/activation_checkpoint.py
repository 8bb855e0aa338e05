"""Activation checkpointing that routes a token the same way when it is computed again.

Recomputing a router in another kernel, or after a reduction in another order, may flip near ties: the all-to-alls of
the recomputed layer would then have other sizes than those of the forward (NVIDIA-NeMo/Automodel#3156). So the ids that
``topk`` chose are kept from the forward, and a recomputation takes the scores at these ids.
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..moe.router.topk_override import RoutingMode
from ..wrap_forward import wrap_forward

__all__ = ["CHECKPOINTING", "Checkpointing", "checkpoint_layers", "units_recomputed"]

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
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
        experts: the experts modules of the model.
        num_experts: the largest number of experts: a ``topk`` over more than these is no routing.
        mode: ``full`` recomputes each layer whole, dispatch and experts included; ``selective`` the parts of a layer
            that hold no experts (attention, norms, dense MLPs), so that no all-to-all runs twice.
        inputs_on_host: keep what goes into them, all that is kept under ``full``, in the host's memory.
    """
    for unit in units_recomputed(layers, experts, mode):
        wrap_forward(unit, "recompute", functools.partial(_recomputed, unit, num_experts, inputs_on_host))


def units_recomputed(layers: Iterable[nn.Module], experts: Iterable[nn.Module], mode: Checkpointing) -> list[nn.Module]:
    """The modules that are computed again as a whole."""
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
    inputs_on_host: bool,
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    # A cache would be appended to a second time.
    kwargs = {name: None if name in _CACHES else value for name, value in kwargs.items()}
    context = functools.partial(_routing_contexts, num_experts)
    if inputs_on_host and not args:  # torch keeps keyword arguments as they are
        forward, args = _first_as("hidden_states", forward), (kwargs.pop("hidden_states"),)
    with _on_host(args[0]) if inputs_on_host else nullcontext():
        return checkpoint(forward, *args, use_reentrant=False, context_fn=context, **kwargs)


def _first_as(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda first, **kwargs: forward(**{name: first}, **kwargs)


def _on_host(hidden: torch.Tensor) -> AbstractContextManager:
    """Of what autograd saves, ``hidden`` is held in the host's memory, and brought back when backward asks for it."""
    address, shape = hidden.data_ptr(), hidden.shape  # hooks live as long as what they saved

    def pack(saved: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
        if saved.data_ptr() != address or saved.shape != shape:
            return saved
        host = torch.empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
        return saved.device, host.copy_(saved, non_blocking=True)

    def unpack(packed: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else packed[1].to(packed[0], non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


def _routing_contexts(num_experts: int) -> tuple[AbstractContextManager, AbstractContextManager]:
    """For one checkpointed call: what surrounds its forward, and what surrounds its recomputation."""
    tape: list[torch.Tensor] = []
    return _KeepRouting(tape, num_experts, replay=False), _KeepRouting(tape, num_experts, replay=True)


class _KeepRouting(RoutingMode):
    """Records the ids of each routing ``topk``, or hands them out again in the same order."""

    def __init__(self, tape: list[torch.Tensor], num_experts: int, replay: bool):
        super().__init__(num_experts)
        self.tape, self.replay = tape, replay

    def __enter__(self):
        self.next = 0
        return super().__enter__()

    def choose(self, scores: torch.Tensor, dim: int, native: Callable[[], torch.Tensor]) -> torch.Tensor:
        # Taken in the same way both times, so that autograd keeps the same tensors.
        if self.replay:
            self.next += 1
            return self.tape[self.next - 1].long()
        ids = native()
        self.tape.append(ids.to(torch.int16) if scores.shape[dim] < 2**15 else ids)
        return ids
