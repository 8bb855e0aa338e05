"""The Triton kernels in Triton's interpreter."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from unittest import mock

import torch

__all__ = ["drawn", "integers", "interpreted_kernels"]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Draw a tensor, equal in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Draw from -2 to 2: sums are exact in any order, which depends on the processor and the shapes of a product."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextlib.contextmanager
def interpreted_kernels() -> Iterator[ModuleType]:
    """Import the Triton backend interpreted, which Triton decides at import."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        backend = importlib.import_module("epfsdp2.engine.moe.gemm.triton_backend")
        builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
        # It would compute every sum of indices once more, in 64 bits, which indices of tests do not need.
        with mock.patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)):
            yield backend
