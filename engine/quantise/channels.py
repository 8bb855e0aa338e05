"""FP8 or INT8 values with one scale for each row of a weight, bit for bit as compressed-tensors makes them.

Rows are what a linear layer computes, its output channels. Scales and quotients are in bfloat16, as the weights that
compressed-tensors quantises are. A row may be cut: its largest value can be computed in parts. Source:
compressed_tensors ``quantization/utils/helpers.py``, ``calculate_qparams``, and ``lifecycle/forward.py``, ``quantize``.
"""

import torch

__all__ = ["CHANNEL_DTYPES", "quantise_rows", "round_rows_in_place", "row_maxima", "row_scales"]

CHANNEL_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# The least and largest value, and half the range of both, by which the library divides.
_RANGES = {torch.float8_e4m3fn: (-448.0, 448.0, 448.0), torch.int8: (-128.0, 127.0, 127.5)}
_AT_ONCE = 1 << 20  # elements that are in bfloat16 at once


def row_maxima(values: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of each row of ``[..., rows, columns]``, as float32 ``[..., rows, 1]``."""
    found = torch.maximum(values.amax(-1, keepdim=True), values.amin(-1, keepdim=True).neg_())
    # The largest of rounded values is the largest, rounded.
    return found.bfloat16().float()


def row_scales(maxima: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the factors by which values are multiplied to give the weight, as float32 of bfloat16's values."""
    scales = maxima.bfloat16() / _RANGES[dtype][2]
    return scales.masked_fill_(scales == 0, torch.finfo(torch.bfloat16).eps).float()


def quantise_rows(values: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> None:
    """Write ``[..., rows, columns]``, rounded to bfloat16 and divided by the scales of their rows, to ``into``."""
    if values.dim() > 2:
        for matrix, own, target in zip(values, scales, into, strict=True):
            quantise_rows(matrix, own, target)
        return
    low, high, _ = _RANGES[into.dtype]
    rows = _rows_at_once(values)
    for part, own, target in zip(values.split(rows), scales.split(rows), into.split(rows), strict=True):
        quotient = (part.bfloat16() / own.bfloat16()).clamp_(low, high)
        target.copy_(quotient if into.dtype.is_floating_point else quotient.round_())


def round_rows_in_place(values: torch.Tensor, dtype: torch.dtype) -> None:
    """Replace ``[..., rows, columns]`` with whole rows by what a rollout has of them: values times scales."""
    for matrix in values.flatten(0, -3) if values.dim() > 2 else [values]:
        for part in matrix.split(_rows_at_once(matrix)):
            scales = row_scales(row_maxima(part), dtype)
            rounded = torch.empty(part.shape, dtype=dtype, device=part.device)
            quantise_rows(part, scales, rounded)
            part.copy_(rounded.float().mul_(scales))


def _rows_at_once(matrix: torch.Tensor) -> int:
    rows, columns = matrix.shape
    return max(1, _AT_ONCE // max(1, columns) if matrix.device.type == "cpu" else rows)
