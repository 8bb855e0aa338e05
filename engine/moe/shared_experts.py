"""Compute shared experts while the experts of their block wait for the dispatch all-to-all.

Some blocks call their shared experts after their experts (DeepSeek, GLM, Nemotron-H). There they are computed from the
block's input while tokens are dispatched, and the block's own call returns that result. Shared experts are found by
their structure, so no family is named here. A block that calls them before the experts, or with another tensor than its
input, is refused.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..errors import SettingError
from ..wrap_forward import wrap_forward

__all__ = ["SharedExperts", "no_overlap_error", "shared_experts_of"]


def shared_experts_of(block: nn.Module, experts: nn.Module) -> list[nn.Module]:
    """Return the shared experts of a block: its children that are MLPs of one tensor and contain no experts."""
    return [child for child in block.children() if experts not in set(child.modules()) and _is_mlp(child)]


def _is_mlp(module: nn.Module) -> bool:
    """Whether a module has several linears (a router has one, or none) and a forward of one argument."""
    linears = [m for m in module.modules() if m is not module and isinstance(m, nn.Linear)]
    if len(linears) < 2 or any(p.dim() > 2 for p in module.parameters()):
        return False
    required = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    return len(required) == 1 and linears[-1].out_features == linears[0].in_features


class SharedExperts:
    """The shared experts of one block, computed when ``compute_ahead`` is called inside its forward.

    Raises:
        SettingError: from the block's forward, if it calls no shared experts after the experts, or calls them with
            another tensor than its input.
    """

    def __init__(self, block: nn.Module, experts: nn.Module):
        self.name = type(block).__name__
        self.forwards: dict[nn.Module, Callable[..., Any]] = {m: m.forward for m in shared_experts_of(block, experts)}
        self.input: torch.Tensor | None = None
        self.called: set[nn.Module] = set()
        self.ready: dict[nn.Module, torch.Tensor] = {}
        for module in self.forwards:
            wrap_forward(module, "shared_experts", functools.partial(self._shared, module))
        wrap_forward(block, "shared_experts", self._block)

    def compute_ahead(self) -> None:
        """Compute the shared experts that the block has not called yet."""
        # An FSDP unit of its own (a module kept in float32) has hooks around its forward, which would be skipped.
        later = [m for m in self.forwards if m not in self.called and not isinstance(m, FSDPModule)]
        if not later:
            raise no_overlap_error(
                f"{self.name} calls its shared experts before the experts, or they compute in float32"
            )
        self.ready |= {module: self.forwards[module](self.input) for module in later}

    def _block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.input = args[0] if args else kwargs["hidden_states"]
        self.version = self.input._version
        try:
            output = forward(*args, **kwargs)
            if self.ready:
                raise no_overlap_error(f"{self.name} calls its shared experts with another tensor than its input")
            return output
        finally:  # also when early stopping of a recomputation raises
            self.input = None
            self.called.clear()
            self.ready.clear()

    def _shared(self, module: nn.Module, forward: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        if module in self.ready and self._is_input(hidden):
            out = self.ready.pop(module)
            return out.view(*hidden.shape[:-1], out.shape[-1])
        self.called.add(module)
        return forward(hidden)

    def _is_input(self, hidden: torch.Tensor) -> bool:
        """Whether a tensor is the block's input, unchanged, or a view of all of it."""
        own = self.input
        if own is None or own._version != self.version:
            return False
        base = own if own._base is None else own._base
        is_view = hidden._base is base and hidden.data_ptr() == own.data_ptr() and hidden.numel() == own.numel()
        return hidden is own or (is_view and hidden.shape[-1] == own.shape[-1] and hidden.is_contiguous())


def no_overlap_error(why: str) -> SettingError:
    """Build the error for a model in which ``engine.overlap_shared_experts`` would do nothing."""
    setting = "engine.overlap_shared_experts"
    return SettingError(
        setting, True, f"{why}: nothing can be computed while tokens are dispatched.", f"{setting}=False"
    )
