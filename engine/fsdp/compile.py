"""``torch.compile`` for the dense parts of the layers.

Compiled parts hold no experts and issue no collective, so a rank that falls back to eager stays in step with the
others. Experts stay eager because their sizes change with every batch. Routers stay eager because the modes that record
or replay their choice (``moe/router``) change between calls: a recomputation in backward would compile anew.
"""

import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..compat.function_modes import without_function_modes
from ..wrap_forward import wrap_forward

__all__ = ["compile_dense_parts"]

logger = logging.getLogger("epfsdp2")


def compile_dense_parts(
    layers: Iterable[nn.Module], experts: Iterable[nn.Module], backend: str | Callable = "inductor"
) -> None:
    """Compile the children of each layer that hold parameters but no experts and are no router.

    The first failure of the compiler is logged with its cause. That part, and every part that is not compiled yet, then
    runs eagerly. A compiled part stays compiled, because a recomputation in backward must give the same result.
    Backwards are compiled in the forward, so that they fail there.
    """
    holding = set(experts)
    failed, with_backward = threading.Event(), functools.partial(_with_backward, backend)
    for layer in layers:
        stacks = [child for child in layer.children() if child in holding]
        for child in layer.children():
            if not any(True for _ in child.parameters()) or holding & set(child.modules()) or _routes(child, stacks):
                continue
            compiled = torch.compile(child.forward, backend=with_backward)
            wrap_forward(child, "compile", _Fallback(failed, type(child).__name__, compiled))


def _routes(part: nn.Module, stacks: Iterable[nn.Module]) -> bool:
    """Return whether a part is the router of experts beside it: it has a matrix with a row for each expert."""
    counts = {param.shape[0] for stack in stacks for param in stack.parameters()}
    return any(param.dim() == 2 and param.shape[0] in counts for param in part.parameters())


def _with_backward(backend: str | Callable, graph: Any, inputs: Any) -> Any:
    """Compile a graph and its backward, which AOTAutograd defers to the first backward if shapes are fixed."""
    config = importlib.import_module("torch._functorch.config")
    name = "force_non_lazy_backward_lowering"
    with config.patch(name, True) if hasattr(config, name) else nullcontext():
        return torch._dynamo.lookup_backend(backend)(graph, inputs)


def _compiler_errors() -> tuple[type[Exception], ...]:
    """Return the compiler's errors; their names are private, so they are looked up after a failure alone."""
    modules = map(importlib.import_module, ("torch._dynamo.exc", "torch._inductor.exc"))
    names = "TorchDynamoException", "InductorError"
    return tuple(getattr(module, name) for module, name in zip(modules, names, strict=True) if hasattr(module, name))


class _Fallback:
    """A part's forward: compiled until compiling fails (of any part, ``failed``), then eager."""

    def __init__(self, failed: threading.Event, name: str, compiled: Callable):
        self.failed, self.name, self.compiled = failed, name, compiled
        self.has_compiled = False

    def __call__(self, eager: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.failed.is_set() and not self.has_compiled:
            return eager(*args, **kwargs)
        try:
            with without_function_modes():
                output = self.compiled(*args, **kwargs)
        except _compiler_errors() as error:
            if not self.failed.is_set():
                inner = getattr(error, "inner_exception", None) or error
                first = next((line for line in str(inner).splitlines() if line.strip()), "no reason given")
                reason = f"{self.name} could not be compiled ({type(inner).__name__}: {first})"
                logger.warning("epfsdp2: engine.compile_dense: %s; running eagerly", reason)
            self.failed.set()
            self.has_compiled = False
            return eager(*args, **kwargs)
        self.has_compiled = True
        return output
