"""A row of ``gpu_check.py``, and the device that sections run on."""

from dataclasses import dataclass

import torch

__all__ = ["DEVICE", "HAS_GPU", "MIB", "NEEDS_A_GPU", "Row"]

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
NEEDS_A_GPU = "needs a GPU"
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """A checked quantity, its value and its bound; ``holds`` is None without a bound."""

    what: str
    value: str
    wanted: str = ""
    holds: bool | None = None
