"""Launches the kernels of ``triton_persistent.py``, and checks their operands."""

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ...compat.torch_sms import sms_left
from . import triton_persistent
from .backends import Groups
from .gate import Gate
from .triton_tiles import INTERPRETED, Tile, tiles_of

__all__ = ["mm", "takes", "up_gate"]

# Major compute capability on which Triton specializes warps. On 9 it would need descriptors made on the device, and
# does not compile these (3.7 and 3.9).
_SPECIALIZES = 10
_Operands = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]  # rows, index and matrices


def takes(rows: torch.Tensor, in_out: torch.Tensor, bias: torch.Tensor | None, gates: int = 1) -> bool:
    """Whether TMA can load the operands: 16-bit, aligned to 16 bytes, one of the matrices' dims contiguous.

    ``gates`` is 2 for ``up_gate``, whose matrices have ``in`` contiguous.
    """
    half = rows.dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    contiguous = (1,) if gates == 2 else (1, 2)
    (inner,) = [dim for dim in contiguous if in_out.stride(dim) == 1][:1] or (0,)
    strides = (*(in_out.stride(dim) for dim in range(3) if dim != inner), rows.shape[1], in_out.shape[2] // gates)
    aligned = all(stride * rows.element_size() % 16 == 0 for stride in strides)
    placed = rows.data_ptr() % 16 == in_out.data_ptr() % 16 == 0
    return half and bias is None and inner > 0 and aligned and placed


def mm(tile: Tile, operands: _Operands, out: torch.Tensor, order: torch.Tensor | None, groups: Groups) -> None:
    """``TritonBackend.mm`` of rows, index and matrices, without a bias."""
    in_out, tiles = operands[2], tiles_of(groups, tile.m)
    described, constants = _described(tile, *operands)
    of_tiles = *tiles.table, tiles.end_of_expert, len(groups.counts_e)
    sizes = in_out.shape[2], in_out.shape[1]
    triton_persistent.grouped_mm[(_programs(),)](*described, out, order, *of_tiles, *sizes, **constants)


def up_gate(tile: Tile, operands: _Operands, results: tuple[torch.Tensor, ...], groups: Groups, gate: Gate) -> None:
    """``TritonBackend.up_gate`` of rows, index and matrices, without a bias, for gates above ups."""
    in_out, tiles = operands[2], tiles_of(groups, tile.m)
    described, constants = _described(tile, *operands, gates=2)
    del constants["K_INNERMOST"]
    constants["LIMITED"] = gate.constants()["LIMITED"]
    of_tiles = *tiles.table, tiles.end_of_expert, len(groups.counts_e)
    sizes = in_out.shape[2] // 2, in_out.shape[1]
    triton_persistent.grouped_mm_gate[(_programs(),)](*described, *results, *of_tiles, *sizes, *gate[:3], **constants)


def _described(
    tile: Tile, rows: torch.Tensor, index: torch.Tensor | None, in_out: torch.Tensor, gates: int = 1
) -> tuple[tuple, dict[str, Any]]:
    """Return a kernel's arguments for rows, index and matrices, and its constants."""
    specializes = not INTERPRETED and torch.cuda.get_device_capability()[0] == _SPECIALIZES
    gathers = index is not None and (specializes or INTERPRETED)
    is_k_innermost = in_out.stride(1) == 1
    constants = {"GATHERS": gathers, "SPECIALIZED": specializes, "K_INNERMOST": is_k_innermost}
    constants |= {"EVEN_K": in_out.shape[1] % tile.k == 0, **tile.constants()}
    described: Any = rows
    if gathers or index is None:
        described = TensorDescriptor.from_tensor(rows, [1 if gathers else tile.m, tile.k])
    matrices, block = (in_out.mT, [1, tile.n, tile.k]) if is_k_innermost else (in_out, [1, tile.k, tile.n])
    if gates == 2:
        matrices, block = matrices.unflatten(1, (2, -1)), [1, 2, tile.n, tile.k]
    return (described, index, TensorDescriptor.from_tensor(matrices, block)), constants


def _programs() -> int:
    """Return the number of programs: one for each SM that is not left to collectives."""
    return 3 if INTERPRETED else max(1, torch.cuda.get_device_properties().multi_processor_count - sms_left())
