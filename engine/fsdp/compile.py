"""``torch.compile`` for the dense parts of the layers.

What is compiled holds no experts and issues no collective, so a rank that falls back to eager does not fall out of step
with the others. The experts stay eager: their sizes change with every batch. So do the routers: modes that record or
replay their choice (``moe/router``) change from call to call, and a part whose guards read them would be compiled anew
when it is computed again in backward.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn

from ..compat.function_modes import without_function_modes
from ..wrap_forward import wrap_forward

__all__ = ["compile_dense_parts"]

logger = logging.getLogger("epfsdp2")


def compile_dense_parts(
    layers: Iterable[nn.Module], experts: Iterable[nn.Module], backend: str | Callable = "inductor"
) -> int:
    """Compile the children of each layer that hold parameters but no experts and are no router; returns how many.

    The first failure of the compiler is logged with its cause; that part, and every part that has not been compiled by
    then, runs eagerly from there on. A part that was compiled stays so: under activation checkpointing it is computed
    again in backward, and has to come out the same. Backwards are compiled in the forward, so that they fail there.
    """
    holding = set(experts)
    failure, with_backward = _Failure(), functools.partial(_with_backward, backend)
    count = 0
    for layer in layers:
        stacks = [child for child in layer.children() if child in holding]
        for child in layer.children():
            if not any(True for _ in child.parameters()) or holding & set(child.modules()) or _routes(child, stacks):
                continue
            compiled = torch.compile(child.forward, backend=with_backward)
            wrap_forward(child, "compile", _Fallback(failure, type(child).__name__, compiled))
            count += 1
    return count


def _routes(part: nn.Module, stacks: Iterable[nn.Module]) -> bool:
    """Return whether a part is the router of experts beside it: a matrix in it has a row for each of them."""
    counts = {param.shape[0] for stack in stacks for param in stack.parameters()}
    return any(param.dim() == 2 and param.shape[0] in counts for param in part.parameters())


def _with_backward(backend: str | Callable, graph: Any, inputs: Any) -> Any:
    """Compile a graph with its backward, which AOTAutograd else leaves to the first backward where shapes are fixed."""
    config = importlib.import_module("torch._functorch.config")
    name = "force_non_lazy_backward_lowering"
    with config.patch(name, True) if hasattr(config, name) else nullcontext():
        return torch._dynamo.lookup_backend(backend)(graph, inputs)


def _compiler_errors() -> tuple[type[Exception], ...]:
    """Return the compiler's errors. Their names are private, so they are looked up only when something has failed."""
    found = []
    for module, name in (("torch._dynamo.exc", "TorchDynamoException"), ("torch._inductor.exc", "InductorError")):
        with suppress(ImportError):
            found.append(getattr(importlib.import_module(module), name, None))
    return tuple(kind for kind in found if kind is not None)


class _Failure:
    """Whether the compiler has failed on any part."""

    def __init__(self) -> None:
        self.happened = False


class _Fallback:
    """A part's forward: the compiled one until compiling fails, then the eager one."""

    def __init__(self, failure: _Failure, name: str, compiled: Callable):
        self.failure, self.name, self.compiled = failure, name, compiled
        self.has_compiled = False

    def __call__(self, eager: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.failure.happened and not self.has_compiled:
            return eager(*args, **kwargs)
        try:
            with without_function_modes():
                output = self.compiled(*args, **kwargs)
        except _compiler_errors() as error:
            if not self.failure.happened:
                inner = getattr(error, "inner_exception", None) or error
                reason = next((line for line in str(inner).splitlines() if line.strip()), "no reason given")
                logger.warning(
                    "epfsdp2: engine.compile_dense: %s could not be compiled (%s: %s); running eagerly",
                    self.name,
                    type(inner).__name__,
                    reason,
                )
            self.failure.happened, self.has_compiled = True, False
            return eager(*args, **kwargs)
        self.has_compiled = True
        return output
