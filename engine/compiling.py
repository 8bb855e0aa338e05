"""``torch.compile`` for the dense parts of the layers.

What is compiled holds no experts and issues no collective, so a rank that falls back to eager does not fall out of step
with the others. The experts stay eager: their sizes change with every batch.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

__all__ = ["compile_dense_parts"]

logger = logging.getLogger("epfsdp2")


def compile_dense_parts(
    layers: Iterable[nn.Module], experts: Iterable[nn.Module], backend: str | Callable = "inductor"
) -> int:
    """Compile the children of each layer that hold parameters but no experts; returns how many.

    The first failure of the compiler is logged once with its cause, and everything runs eagerly from there on.
    """
    holding = set(experts)
    fallback = _Fallback()
    count = 0
    for child in (c for layer in layers for c in layer.children()):
        if any(True for _ in child.parameters()) and not holding & set(child.modules()):
            compiled = torch.compile(child.forward, backend=backend)
            child.forward = functools.partial(fallback, type(child).__name__, compiled, child.forward)  # type: ignore[method-assign]
            count += 1
    return count


class _Fallback:
    """Calls the compiled forward until compiling fails for the first time, then the eager one."""

    def __init__(self) -> None:
        self.failed = False

    def __call__(self, name: str, compiled: Callable, eager: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.failed:
            return eager(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except (TorchDynamoException, InductorError) as error:
            self.failed = True
            inner = getattr(error, "inner_exception", None) or error
            reason = next((line for line in str(inner).splitlines() if line.strip()), "no reason given")
            logger.warning(
                "epfsdp2: engine.compile_dense: %s could not be compiled (%s: %s); running eagerly",
                name,
                type(inner).__name__,
                reason,
            )
            return eager(*args, **kwargs)
