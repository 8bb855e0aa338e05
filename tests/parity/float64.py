"""Compute in float64 where a model's code, FSDP and the engine name float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from epfsdp2.engine.config.values import DTYPES

__all__ = ["float64"]


@contextmanager
def float64() -> Iterator[None]:
    """Build, load, compute and step in float64; files have to be in float64 too.

    Norms, softmaxes, rotary embeddings, states and routers name float32, whose rounding hides differences of 1e-12.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    wide = {name: torch.float64 for name, dtype in DTYPES.items() if dtype is torch.float32}
    names = mock.patch.multiple(torch, float32=torch.float64, float=torch.float64)
    try:
        with mock.patch.dict(DTYPES, wide), names, mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(before)
