"""Shared experts beside the all-to-all of the experts in their block.

A block that asks for its shared experts after it has asked for the experts, as DeepSeek's, GLM's and Nemotron-H's do,
leaves them for a time in which tokens travel. They are computed then, of what the block was handed, and given out
when the block asks for them. Nothing is known of a family: they are found by what they are, and a block that asks for
them first, or with something else, is refused.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..errors import SettingError

__all__ = ["SharedExperts", "runs_shared_first", "shared_experts_of", "no_overlap_error"]


def shared_experts_of(block: nn.Module, experts: nn.Module) -> list[nn.Module]:
    """What may be shared experts in a block: its children that are MLPs of one tensor, without experts in them."""
    return [child for child in block.children() if experts not in set(child.modules()) and _is_mlp(child)]


def _is_mlp(module: nn.Module) -> bool:
    """It has several linear maps in modules of their own (a router has one, or none), and its forward one argument."""
    linears = [m for m in module.modules() if m is not module and isinstance(m, nn.Linear)]
    if len(linears) < 2 or any(p.dim() > 2 for p in module.parameters()):
        return False
    required = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    return len(required) == 1 and linears[-1].out_features == linears[0].in_features


def runs_shared_first(block: nn.Module, experts: nn.Module) -> bool:
    """Whether a block asks for its shared experts before the experts: it is run up to the first of them, on zeros.

    False where that takes more than hidden states; it is seen when the block runs.
    """
    shared = shared_experts_of(block, experts)
    weight = next(m.weight for m in shared[0].modules() if isinstance(m, nn.Linear))
    handles = [module.register_forward_pre_hook(_meet) for module in (experts, *shared)]
    try:
        with torch.no_grad():
            block(weight.new_zeros(1, 2, weight.shape[1]))
    except _Met as met:
        return met.module is not experts
    except (AttributeError, RuntimeError, TypeError):  # what else it takes was None, or on another device than meta
        return False
    finally:
        for handle in handles:
            handle.remove()
    return False


class _Met(Exception):
    def __init__(self, module: nn.Module):
        self.module = module


def _meet(module: nn.Module, args: Any) -> None:
    raise _Met(module)


class SharedExperts:
    """The shared experts of one block, computed when ``compute_ahead`` is called in its forward.

    Raises:
        SettingError: from the block's forward, if it asks for none after the experts, or with another tensor than it
            was handed.
    """

    def __init__(self, block: nn.Module, experts: nn.Module):
        self.name = type(block).__name__
        self.forwards: dict[nn.Module, Callable[..., Any]] = {m: m.forward for m in shared_experts_of(block, experts)}
        self.input: torch.Tensor | None = None
        self.asked: set[nn.Module] = set()
        self.ready: dict[nn.Module, torch.Tensor] = {}
        # On the instances: modules keep their class and parameters their names.
        for module in self.forwards:
            module.forward = functools.partial(self._shared, module)  # type: ignore[method-assign]
        block.forward = functools.partial(self._block, block.forward)  # type: ignore[method-assign]

    def compute_ahead(self) -> None:
        """Compute those that the block has not asked for yet."""
        assert self.input is not None
        # An island has hooks of its own around its forward.
        later = [m for m in self.forwards if m not in self.asked and not isinstance(m, FSDPModule)]
        if not later:
            raise no_overlap_error(f"{self.name} asks for its shared experts first, or they compute in float32")
        for module in later:
            self.ready[module] = self.forwards[module](self.input)

    def _block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.input = args[0] if args else kwargs["hidden_states"]
        self.version = self.input._version
        try:
            output = forward(*args, **kwargs)
            if self.ready:
                raise no_overlap_error(
                    f"{self.name} asks for its shared experts with another tensor than it was handed"
                )
            return output
        finally:
            # A recomputation ends by an exception where nothing more is needed.
            self.input = None
            self.asked.clear()
            self.ready.clear()

    def _shared(self, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        if module in self.ready and self._is_input(hidden):
            out = self.ready.pop(module)
            return out.view(*hidden.shape[:-1], out.shape[-1])
        self.asked.add(module)
        return self.forwards[module](hidden)

    def _is_input(self, hidden: torch.Tensor) -> bool:
        """Whether it is what the block was handed, or a view of all of it."""
        own = self.input
        if own is None or own._version != self.version:
            return False
        base = own if own._base is None else own._base
        is_view = hidden._base is base and hidden.data_ptr() == own.data_ptr() and hidden.numel() == own.numel()
        return hidden is own or (is_view and hidden.shape[-1] == own.shape[-1] and hidden.is_contiguous())


def no_overlap_error(why: str) -> SettingError:
    """The refusal of the setting where it would do nothing."""
    setting = "engine.overlap_shared_experts"
    return SettingError(setting, True, f"{why}: nothing can be computed while tokens travel.", f"{setting}=False")
