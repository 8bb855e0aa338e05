"""torchao's grouped GEMM in MXFP8, a prototype whose place and name may change (torchao 0.18)."""

from collections.abc import Callable
from typing import Any

from .private_names import look_up

__all__ = ["mxfp8_grouped_mm"]

_KNOWN, _INSTEAD = "0.18", "engine.experts_backend=auto"


def mxfp8_grouped_mm(is_emulated: bool) -> Callable[..., Any]:
    """Return the differentiable grouped GEMM, with its other arguments as in torchao's own MXFP8 training.

    Args:
        is_emulated: in plain operators that run on a CPU.

    Raises:
        MissingNameError: this torchao has none.
    """
    module = "torchao.prototype.moe_training.mxfp8_grouped_mm"
    grouped_mm = look_up(f"{module}:_to_mxfp8_then_scaled_grouped_mm", known=_KNOWN, instead=_INSTEAD)
    preferences = look_up("torchao.quantization.quantize_.common:KernelPreference", known=_KNOWN, instead=_INSTEAD)
    preference = preferences.EMULATED if is_emulated else preferences.AUTO

    def product(rows: Any, in_out: Any, offsets: Any) -> Any:
        return grouped_mm(
            rows,
            in_out,
            offsets,
            out_dtype=rows.dtype,
            kernel_preference=preference,
            pad_token_groups_for_grouped_mm=True,
        )

    return product
