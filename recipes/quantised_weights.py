"""Find and dequantise the weights of quantised checkpoints.

A weight's format is recognised by its tensors:

| format | stored as |
|---|---|
| FP8 and INT8 (DeepSeek-V3, compressed-tensors, ModelOpt) | ``weight`` with ``weight_scale_inv`` or ``weight_scale`` |
| MXFP4 (DeepSeek-V4) | ``weight``, two values in a byte, with ``scale`` or ``weight_scale_inv`` |
| MXFP4 (gpt-oss) | ``*_blocks``, two values in a byte, transposed, with ``*_scales`` |
| MXFP4, NVFP4 (compressed-tensors) | ``weight_packed`` with ``weight_scale``, and ``weight_global_scale`` |
| NVFP4 (ModelOpt) | ``weight``, two values in a byte, with ``weight_scale`` and ``weight_scale_2`` |
| INT4 and INT8 (compressed-tensors; Kimi) | ``weight_packed``, several values in 32 bits, with ``weight_scale`` |
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.checkpoint.safetensors_reader import CheckpointFiles
from ..engine.errors import listed

__all__ = ["OF_ACTIVATIONS", "QuantisationError", "QuantisedWeight", "find_quantised", "unpack_fp4", "unpack_int32"]

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_KNOWN = "Known are FP8, INT8, INT4, MXFP4 and NVFP4 weights with scales alone."
_CHUNK = 1 << 24  # elements in float32 at once
_ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
# Ending of a weight's values -> endings of its scales, and of the scale of the whole tensor.
_SCALES = {
    "weight": (("weight_scale_inv", "weight_scale", "scale"), ("weight_scale_2",)),
    "weight_packed": (("weight_scale",), ("weight_global_scale",)),
    "_blocks": (("_scales",), ()),
    "": (("_scale_inv",), ()),
}
OF_ACTIVATIONS = re.compile(r"(^|[._])(input_scale|input_global_scale|activation_scale|output_scale|[kvq]_scale)$")
_UNKNOWN = re.compile(r"(^|\.)(weight_zero_point|weight_g_idx|qweight|qzeros)$")


class QuantisationError(ValueError):
    """A checkpoint's format is unknown, or its tensors do not fit together."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight as a quantised checkpoint stores it; name and shape are the dequantised weight's."""

    name: str
    shape: tuple[int, ...]
    values: str  # keys of the stored tensors
    scales: str
    global_scale: str | None  # of the whole tensor
    block: tuple[int, int]  # rows and columns that share a scale
    bits: int  # of a packed value, 4 for FP4 and INT4; 0 for values that are not packed

    def dequantised(self, files: CheckpointFiles, dtype: torch.dtype) -> torch.Tensor:
        """Return the values in ``dtype``, rounded once from float32; the computation runs in chunks."""
        scales = files.read(self.scales)
        # Scales in uint8 are exponents of two with a bias of 127.
        scales = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
        if scales.dim() == 1:
            scales = scales.unsqueeze(-1)
        if self.global_scale is not None:
            whole = files.read(self.global_scale).float()
            # compressed-tensors stores the factor that scales were multiplied by, ModelOpt its inverse.
            scales = scales / whole if self.global_scale.endswith("weight_global_scale") else scales * whole
        found = torch.empty(self.shape, dtype=dtype)
        is_transposed = self.values.endswith("_blocks")
        each = max(1, _CHUNK // max(1, math.prod(self.shape[1:])))
        for first in range(0, self.shape[0], each):
            index = slice(first, min(first + each, self.shape[0]))
            stored = files.read(self.values, (index,))
            if is_transposed:
                stored = stored.flatten(-2)
            rows = range(self.shape[-1] if is_transposed else self.shape[-2])
            if len(self.shape) == 2:
                rows = range(*index.indices(self.shape[0]))
            own = scales[index] if len(self.shape) == 3 and scales.dim() == 3 else scales
            values = self._unpacked(stored) * self._expanded(own, rows)
            found[index] = values.transpose(-2, -1) if is_transposed else values
        return found

    def _unpacked(self, stored: torch.Tensor) -> torch.Tensor:
        if self.bits == 0:
            return stored.float()
        if stored.dtype == torch.int32:
            return unpack_int32(stored, self.bits, self.shape[-1]).float()
        return unpack_fp4(stored)

    def _expanded(self, scales: torch.Tensor, rows: range) -> torch.Tensor:
        """Return the scale of each element of these rows."""
        if scales.numel() == 1:
            return scales.reshape(())
        columns = self.shape[-2] if self.values.endswith("_blocks") else self.shape[-1]
        of_rows = torch.arange(rows.start, rows.stop) // self.block[0]
        return scales[..., of_rows, :][..., torch.arange(columns) // self.block[1]]


def find_quantised(files: CheckpointFiles, config: Mapping[str, Any]) -> tuple[list[QuantisedWeight], set[str]]:
    """Return the quantised weights of a checkpoint, and the keys of scales, which a plain checkpoint lacks.

    Args:
        config: the checkpoint's ``quantization_config``.

    Raises:
        QuantisationError: the format is unknown, or weights lack their scales.
    """
    keys = files.file_of.keys()
    unknown = sorted(key for key in keys if _UNKNOWN.search(key))
    if unknown or config.get("transform_config"):
        what = f"tensors that are not understood: {listed(unknown)}" if unknown else "weights that were rotated"
        raise QuantisationError(f"{files.folder} has {what}. {_KNOWN}")
    found = [weight for key in keys if (weight := _quantised(key, files, config)) is not None]
    consumed = {key for key in keys if OF_ACTIVATIONS.search(key)}
    for weight in found:
        consumed |= keys & {weight.scales, weight.global_scale, f"{weight.values.removesuffix('_packed')}_shape"}
    handled = consumed | {weight.values for weight in found}
    left = [key for key in keys if key not in handled and _is_quantised(key, files)]
    if left:
        raise QuantisationError(f"{files.folder} has quantised tensors without scales: {listed(left)}. {_KNOWN}")
    return found, consumed


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Return float32 values ``[..., 2 N]`` of E2M1 numbers in bytes ``[..., N]``, the first in the low half."""
    byte = packed.contiguous().view(torch.uint8)
    return _FP4[torch.stack([byte & 0xF, byte >> 4], dim=-1).flatten(-2).int()]


def unpack_int32(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Return signed integers of ``bits`` bits, int32 ``[..., columns]``, packed in int32 ``[..., N]`` from low bits."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    values = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2)[..., :columns] - (1 << (bits - 1))


def _quantised(key: str, files: CheckpointFiles, config: Mapping[str, Any]) -> QuantisedWeight | None:
    keys = files.file_of.keys()
    ending = next(ending for ending in _SCALES if key.endswith(ending))
    stem = key.removesuffix(ending)
    scales, whole = (next((stem + end for end in ends if stem + end in keys), None) for ends in _SCALES[ending])
    if scales is None or not _is_quantised(key, files):
        return None
    dtype, shape, grid = files.dtype(key), files.shape(key), files.shape(scales)
    bits = 0
    if dtype == torch.int32:
        known = sorted({int(number) for number in _of_groups(config, "num_bits")})
        if len(known) != 1:
            raise QuantisationError(f"quantization_config has {known} as num_bits of packed weights; one is needed.")
        bits = known[0]
        shape = (*shape[:-1], int(files.read(f"{stem}weight_shape")[-1]))
    elif ending == "_blocks":
        bits, shape = 4, (*shape[:-2], 2 * math.prod(shape[-2:]))
    elif dtype == torch.uint8 or (dtype == torch.int8 and files.dtype(scales) == torch.float8_e8m0fnu):
        bits, shape = 4, (*shape[:-1], 2 * shape[-1])
    block = _block(key, shape, grid, config)
    if ending == "_blocks":
        return QuantisedWeight(stem, (shape[0], shape[2], shape[1]), key, scales, None, block, bits)
    return QuantisedWeight(f"{stem}{ending.removesuffix('_packed')}", shape, key, scales, whole, block, bits)


def _block(key: str, shape: tuple[int, ...], grid: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns that share a scale."""
    if math.prod(grid) == 1:
        return (shape[-2], shape[-1]) if len(shape) > 1 else (1, 1)
    given = config.get("weight_block_size") or next(iter(_of_groups(config, "block_structure")), None)
    if len(shape) == 2 and grid == shape[:1]:
        return 1, shape[1]
    if len(grid) == len(shape) >= 2 and grid[:-2] == shape[:-2]:
        if given and grid[-2:] == (-(-shape[-2] // given[0]), -(-shape[-1] // given[1])):
            return given[0], given[1]
        if not shape[-2] % grid[-2] and not shape[-1] % grid[-1]:
            return shape[-2] // grid[-2], shape[-1] // grid[-1]
    raise QuantisationError(f"{key} is {list(shape)}, and its scales are {list(grid)}: their blocks are unknown.")


def _of_groups(config: Mapping[str, Any], name: str) -> list[Any]:
    """Return the values of an option of weights in the config's groups."""
    weights = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
    return [of[name] for of in weights if of.get(name)]


def _is_quantised(key: str, files: CheckpointFiles) -> bool:
    dtype = files.dtype(key)
    return dtype in _ONE_BYTE or (dtype == torch.int32 and key.endswith("weight_packed"))
