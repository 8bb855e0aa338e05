"""``torch.compile`` for the dense parts of the layers.

What is compiled holds no experts and issues no collective, so a rank that falls back to eager does not fall out of step
with the others. The experts stay eager: their sizes change with every batch.
"""

import importlib
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ..wrap_forward import wrap_forward

__all__ = ["compile_dense_parts"]

logger = logging.getLogger("epfsdp2")


def compile_dense_parts(
    layers: Iterable[nn.Module], experts: Iterable[nn.Module], backend: str | Callable = "inductor"
) -> int:
    """Compile the children of each layer that hold parameters but no experts; returns how many.

    The first failure of the compiler in a forward is logged with its cause; that part, and every part that has not been
    compiled by then, runs eagerly from there on. A part that was compiled stays so: under activation checkpointing it
    is computed again in backward, and has to come out the same. A backward that can't be compiled is an error.
    """
    holding = set(experts)
    failure = _Failure()
    count = 0
    for child in (c for layer in layers for c in layer.children()):
        if any(True for _ in child.parameters()) and not holding & set(child.modules()):
            compiled = torch.compile(child.forward, backend=backend)
            wrap_forward(child, "compile", _Fallback(failure, type(child).__name__, compiled))
            count += 1
    return count


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
            output = self.compiled(*args, **kwargs)
        except _compiler_errors() as error:
            self.failure.happened, self.has_compiled = True, False
            inner = getattr(error, "inner_exception", None) or error
            reason = next((line for line in str(inner).splitlines() if line.strip()), "no reason given")
            logger.warning(
                "epfsdp2: engine.compile_dense: %s could not be compiled (%s: %s); running eagerly",
                self.name,
                type(inner).__name__,
                reason,
            )
            return eager(*args, **kwargs)
        self.has_compiled = True
        return output
