"""Gradients of FSDP groups of one rank, which there is nothing to reduce of: packed by FSDP and divided where they lie.

FSDP2 packs a module's gradients into a buffer, divides that into another and copies the result into a third
(``_fsdp_collectives.py``, ``foreach_reduce``, torch 2.13). With ``ep`` over all ranks these are all experts' gradients.
Its extension points ``set_custom_reduce_scatter`` and ``set_all_reduce_hook`` leave the first.
"""

import math
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

__all__ = ["reduce_in_place"]


def reduce_in_place(module: FSDPModule, divide_by: float) -> None:
    """Have the gradients of a module whose shard group is one rank become what was packed, divided.

    Over replicas (HSDP) FSDP takes the mean of them; the division comes after.
    """
    module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    module.set_custom_reduce_scatter(cast(Any, _SameBuffer()))

    def divide(gradients: torch.Tensor) -> None:
        if divide_by != 1:
            gradients.div_(divide_by)
        if gradients.is_cuda:  # allocated on another stream than this one
            gradients.record_stream(torch.cuda.current_stream())

    module.set_all_reduce_hook(divide)


class _SameBuffer:
    """In the place of FSDP's reduce-scatter. FSDP asks for what it packs into, then for the result, to copy to.

    A copy of a tensor to itself is none.
    """

    def __init__(self) -> None:
        self._packed: torch.Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        packed, self._packed = self._packed, None
        # Of another size it is what an error left, or another protocol than FSDP's: then FSDP copies.
        if packed is not None and packed.dtype == dtype and packed.numel() == math.prod(size):
            return packed
        self._packed = torch.empty(*size, dtype=dtype, device=device)
        return self._packed

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a group of one rank has nothing to reduce")
