"""Skip two copies in FSDP2's gradient reduction where the shard group has a single rank (experts with ``ep == world``).

FSDP2 packs a module's gradients into a buffer, divides that into another and copies the result into a third
(``_fsdp_collectives.py``, ``foreach_reduce``, torch 2.13). With ``ep`` over all ranks this happens to every expert's
gradient. ``set_custom_reduce_scatter`` and ``set_all_reduce_hook``, FSDP's extension points, let the first buffer be
divided in place and become the gradient.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

__all__ = ["reduce_in_place"]


def reduce_in_place(module: FSDPModule, divide_by: float) -> None:
    """Divide the packed gradients of a module in place; its shard group has one rank.

    With replicas (HSDP) FSDP takes the mean over the replicas; the division is done in addition.
    """
    module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    buffer = _SameBuffer()
    module.set_custom_reduce_scatter(cast(Any, buffer))

    def divide(gradients: torch.Tensor) -> None:
        buffer.check_is_complete()
        if divide_by != 1:
            gradients.div_(divide_by)
        if gradients.is_cuda:  # allocated on another stream than this one
            gradients.record_stream(torch.cuda.current_stream())

    module.set_all_reduce_hook(divide)


class _SameBuffer:
    """Replaces FSDP's reduce-scatter: input and output are one buffer, so FSDP's copy between them is a no-op.

    FSDP allocates the buffer that it packs into, then the one for the result. Only FSDP holds the first, so an error
    between the two leaves no buffer behind for the next backward.
    """

    def __init__(self) -> None:
        self._packed: Callable[[], torch.Tensor | None] = lambda: None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer to pack into, or the packed one for the result.

        Raises:
            RuntimeError: the result is not of the size and dtype of what was packed.
        """
        packed = self._packed()
        if packed is None:
            packed = torch.empty(*size, dtype=dtype, device=device)
            self._packed = weakref.ref(packed)
            return packed
        self._packed = lambda: None
        if (packed.numel(), packed.dtype) != (math.prod(size), dtype):
            raise RuntimeError(
                f"FSDP packed {packed.numel()} gradients of {packed.dtype} and asks for {math.prod(size)} of {dtype} "
                f"to reduce them into: torch {torch.__version__} reduces in another way than this was made for."
            )
        return packed

    def check_is_complete(self) -> None:
        """Check that the result was allocated as well.

        Raises:
            RuntimeError: a buffer was packed, and the result is another one.
        """
        if self._packed() is not None:
            raise RuntimeError(
                f"FSDP asked for gradients' buffers an odd number of times: torch {torch.__version__} reduces in "
                "another way than this was made for, or goes on after an error in a backward."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a group of one rank has nothing to reduce")
