"""Skip FSDP2's copies where a unit's shard group has a single rank (experts with ``ep * etp == world``).

FSDP2 copies the shards of such a unit into the parameters that it computes with, packs its gradients into a buffer,
divides that into another and copies the result into a third (``FSDPParamGroup.wait_for_unshard`` and ``post_backward``,
``foreach_reduce``; torch 2.13). Here it computes with the shards themselves, or casts them once where it needs another
dtype, and its gradients, divided in place, are those of the shards. FSDP2 has no extension point for either, so two
methods of the parameter groups concerned are wrapped, and two of their parameters. With replicas (HSDP) FSDP2 reduces
over these what it has packed; ``set_custom_reduce_scatter`` and ``set_all_reduce_hook`` let that buffer become the
gradient.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..compat.fsdp_groups import keeping_version, parameter_groups
from ..topology.dtensor import local_tensor

__all__ = ["compute_with_copies", "compute_with_shards", "keep_gradients", "keeping_casts", "reduce_in_place"]


def compute_with_shards(module: FSDPModule) -> None:
    """Have a unit compute with its shards, or with what they are in its dtype; its shard group has one rank."""
    for group in parameter_groups(module):
        group.own_shards = [_OwnShard(param) for param in group.fsdp_params]
        _wrap_unshard(group, group.own_shards)


@contextlib.contextmanager
def keeping_casts(model: nn.Module) -> Iterator[None]:
    """Cast each shard once inside of this context, in which no weight may change, and free what it was cast into.

    No counter tells a cast of old weights from one of new ones: torch's fused and foreach optimizers step DTensors
    without a new ``_version`` (2.13).
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [g for module in modules for g in parameter_groups(module) if hasattr(g, "own_shards")]
    for group in groups:
        for shard in group.own_shards:
            shard.keeps_cast = True
    try:
        yield
    finally:
        for group in groups:
            for shard in group.own_shards:
                shard.let_go(group.is_sharded)


def compute_with_copies(group: Any) -> None:
    """Leave a parameter group the copies that FSDP makes, for code that changes them."""
    group.computes_with_copies = True


def _wrap_unshard(group: Any, shards: list["_OwnShard"]) -> None:
    fsdps = group.wait_for_unshard

    def wait_for_unshard() -> None:
        if group._all_gather_result is None or getattr(group, "computes_with_copies", False):
            return fsdps()
        with contextlib.ExitStack() as unsharding:
            for shard in shards:
                unsharding.enter_context(shard.as_gathered())
            fsdps()

    group.wait_for_unshard = wait_for_unshard


class _OwnShard:
    """Has one ``FSDPParam`` take its shard for what was gathered: FSDP then copies it to itself, which does nothing.

    FSDP keeps the parameter that it computes with, whose data are the shard's, from one step to the next. Where the
    shard moves (offloading) both are made anew, so that nothing holds the memory that it was in.
    """

    def __init__(self, param: Any):
        self._param = param
        self.keeps_cast = self._is_cast = False
        self._free, self._reset = param.free_unsharded_param, param.reset_sharded_param
        param.free_unsharded_param, param.reset_sharded_param = self._free_copy, self._reset_shard

    @contextlib.contextmanager
    def as_gathered(self) -> Iterator[None]:
        """While FSDP unshards, it finds the shard as what was gathered, or, in another dtype, what it was cast into.

        FSDP itself would cast it into a new tensor and copy that. A shard on the host is left to FSDP, and so is one
        that is a part of a larger storage, which FSDP would resize.
        """
        param, shard = self._param, self._param._sharded_param_data
        if type(shard) is not torch.Tensor or param.offload_to_cpu:
            yield
        elif param.param_dtype is None:
            if not param.all_gather_outputs and shard.untyped_storage().size() == shard.nbytes:
                param.all_gather_outputs = [shard]
            yield
        else:
            param._sharded_param_data = self._cast(shard)
            try:
                yield
            finally:
                param._sharded_param_data = shard

    @torch.no_grad()
    def _cast(self, shard: torch.Tensor) -> torch.Tensor:
        param = self._param
        param.init_all_gather_outputs([shard.numel()], [param.param_dtype], 1, shard.device)
        param.alloc_all_gather_outputs()
        (gathered,) = param.all_gather_outputs
        if not self._is_cast:
            with keeping_version(gathered):
                gathered.copy_(shard)
            self._is_cast = self.keeps_cast
        return gathered

    def let_go(self, is_sharded: bool) -> None:
        """Keep no cast any more; one that is not in use is freed."""
        self.keeps_cast = self._is_cast = False
        if is_sharded:
            self._free_copy()

    @property
    def _is_used(self) -> bool:
        return any(gathered is self._param._sharded_param_data for gathered in self._param.all_gather_outputs)

    def _free_copy(self) -> None:
        if not self._is_used and not self._is_cast:
            self._free()

    def _reset_shard(self) -> None:
        was_used = self._is_used
        self._reset()
        if was_used and not self._is_used:
            self._param.all_gather_outputs = []
            vars(self._param).pop("_unsharded_param", None)


def keep_gradients(module: FSDPModule, divide_by: float) -> None:
    """Make a unit's gradients, divided in place, those of its shards; its shard group has one rank and no replicas."""
    for group in parameter_groups(module):
        _wrap_post_backward(group, divide_by)


def _wrap_post_backward(group: Any, divide_by: float) -> None:
    fsdps = group.post_backward

    def post_backward(*unused: Any) -> None:
        if group.reduce_grads:
            _keep_gradients(group.fsdp_params, divide_by)
        fsdps(*unused)  # finds no gradients

    group.post_backward = post_backward


@torch.no_grad()
def _keep_gradients(params: list[Any], divide_by: float) -> None:
    for param in params:
        _keep_gradient(param, divide_by)


def _keep_gradient(param: Any, divide_by: float) -> None:
    gradient, unsharded = None, getattr(param, "_unsharded_param", None)
    if unsharded is None:
        return
    if hasattr(param, "accumulate_unsharded_grad_if_needed"):  # torch 2.13 holds what it has not reduced apart
        param.accumulate_unsharded_grad_if_needed()
        if param.unsharded_accumulated_grad is not None:
            gradient, param.unsharded_accumulated_grad = param.unsharded_accumulated_grad_data, None
    if gradient is None and unsharded.grad is not None:
        gradient, unsharded.grad = param.unsharded_grad_data, None
    if gradient is None:
        return
    sharded, scale = param.sharded_param, 1 / divide_by
    if sharded.grad is None:
        sharded.grad = param.to_sharded_dtensor(_scaled(gradient, scale, param.orig_dtype))
    else:
        local_tensor(sharded.grad).add_(gradient, alpha=scale)
    for hook in (sharded._post_accumulate_grad_hooks or {}).values():
        hook(sharded)


def _scaled(gradient: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Scale and cast a gradient in one pass over it; one of ``dtype`` is changed in place."""
    if scale == 1:
        return gradient.to(dtype)
    if gradient.dtype == dtype:
        return gradient.mul_(scale)
    # A dim, unlike a number, takes part in the choice of the result's dtype.
    return torch.mul(gradient, torch.tensor([scale], dtype=torch.float32, device=gradient.device)).to(dtype)


def reduce_in_place(module: FSDPModule, divide_by: float) -> None:
    """Divide the packed gradients of a module in place, in addition to the mean over replicas that FSDP takes; its
    shard group has one rank."""
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
