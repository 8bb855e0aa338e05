"""What a section of ``gpu_check.py`` yields, and where it runs."""

from dataclasses import dataclass

import torch

__all__ = ["DEVICE", "HAS_GPU", "MIB", "NEEDS_A_GPU", "Row"]

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
NEEDS_A_GPU = "needs a GPU"
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """What was looked at, what came out, and what it had to be; ``holds`` is None where nothing was asked."""

    what: str
    value: str
    wanted: str = ""
    holds: bool | None = None
