"""Local experts whose products are torchao's grouped GEMMs in MXFP8 (``engine.experts_backend=torchao:mxfp8``).

Rows, weights and, in backward, gradients are rounded by torchao, 32 values to a scale; what is kept, sent and reduced
is in the dtypes of any other backend. On a CPU torchao emulates it in plain operators, which is for tests.
"""

import importlib.util
from functools import cache
from typing import Any

import torch

from ...compat.torchao_names import mxfp8_grouped_mm
from ...errors import SettingError

__all__ = ["MXFP8_BLOCK", "check_torchao", "mxfp8_linear"]

MXFP8_BLOCK = 32  # values that share a scale
_SETTING, _KINDS = "engine.experts_backend", ("torchao:mxfp8",)
_AUTO = f"{_SETTING}=auto"
_BLACKWELL = 10  # major compute capability of the GPUs that have products in MXFP8
_find = cache(mxfp8_grouped_mm)


def check_torchao(wanted: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Check that torchao's products of a kind run here; return a line for the log where they are emulated.

    Raises:
        SettingError: there is no such kind, or it can't run here.
    """
    if wanted == "torchao:fp8_rowwise":
        rule = "torchao emulates no rowwise products on a CPU, so that nothing has compared their gradients here."
        raise SettingError(_SETTING, wanted, rule, f"{_SETTING}={_KINDS[0]}, or {_AUTO}")
    if wanted not in _KINDS:
        raise SettingError(_SETTING, wanted, f"of torchao there is {', '.join(_KINDS)}.", _AUTO)
    if importlib.util.find_spec("torchao") is None:
        raise SettingError(_SETTING, wanted, "torchao is not installed.", f"pip install torchao==0.18.0, or {_AUTO}")
    if dtype != torch.bfloat16:
        rule = f"torchao takes rows in bfloat16, and engine.dtype says {dtype}."
        raise SettingError(_SETTING, wanted, rule, f"engine.dtype=bfloat16, or {_AUTO}")
    if device_type == "cpu":
        return f"{_SETTING}={wanted}: torchao emulates it on a CPU, slowly, for tests"
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (_BLACKWELL, 0)
    if device_type != "cuda" or capability[0] != _BLACKWELL:
        found = f"{device_type} {capability[0]}.{capability[1]}" if device_type == "cuda" else device_type
        rule = f"products in MXFP8 need a GPU of compute capability {_BLACKWELL}, and this is {found}."
        raise SettingError(_SETTING, wanted, rule, _AUTO)
    return None


def mxfp8_linear(
    rows: torch.Tensor, weight: torch.Tensor, counts_e: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool
) -> torch.Tensor:
    """Apply expert ``i``'s linear to the ``i``-th group of rows; as ``forward.grouped_linear``."""
    # torchao takes matrices whose dim of the sum is contiguous.
    out_in = weight.transpose(-2, -1).contiguous() if is_transposed else weight
    if rows.shape[0] == 0:
        # Gradients are dense: FSDP would skip a None on this rank only.
        out: Any = rows.new_empty(0, out_in.shape[1]) + rows.sum() + weight.flatten()[:0].sum()
    else:
        offsets = torch.cumsum(counts_e, dim=0).to(torch.int32)
        with torch.autocast(rows.device.type, enabled=False):
            out = _find(rows.device.type == "cpu")(rows.to(weight.dtype), out_in.transpose(-2, -1), offsets)
    if bias is not None:
        out = out + torch.repeat_interleave(bias, counts_e, dim=0, output_size=rows.shape[0])
    return out
