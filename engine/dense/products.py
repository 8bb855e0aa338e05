"""Dense products whose rows have the same bits for any number of rows.

On a GPU, cuBLAS chooses a kernel by all sizes of a product, and kernels sum in different orders. ``torch.library``
replaces the process's products by the experts' GEMM, which sums along the inner dim in one order for every tile. So
linears, routers, the head and attention in plain operators need no code of their own.
"""

import functools
import warnings
from typing import Any

import torch

from ..moe.gemm.backends import Groups

__all__ = ["prepare", "replace_products"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def prepare(device: str) -> None:
    """Make this process's dense operators compute a row with the same bits in any multiple of ``ROWS`` rows."""
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        replace_products(device)


@functools.cache
def replace_products(device: str) -> Any:
    """Replace torch's products on a device until the process ends; returns the registration."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every kernel that is replaced
        for name, product in {
            "mm": _mm,
            "mm.out": _mm_out,
            "addmm": _addmm,
            "bmm": _bmm,
            "baddbmm": _baddbmm,
        }.items():
            library.impl(name, product, device.upper())
    return library


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply ``[B, M, K]`` by ``[B, K, N]``."""
    from ..moe.gemm.triton_backend import TritonBackend  # Triton is optional

    if a.dtype not in _DTYPES or a.dtype != b.dtype:
        raise TypeError(f"engine.batch_invariant has no product of {a.dtype} and {b.dtype}.")
    batches, rows, _ = a.shape
    groups = Groups(torch.full((batches,), rows, device=a.device), batches * rows)
    return TritonBackend().mm(a.reshape(batches * rows, -1), b, groups).view(batches, rows, -1)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _bmm(a[None], b[None])[0]


def _mm_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(_mm(a, b))


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    return _baddbmm(bias, a[None], b[None], beta=beta, alpha=alpha)[0]


def _baddbmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    product = _bmm(a, b) if alpha == 1 else _bmm(a, b) * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)
