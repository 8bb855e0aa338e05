"""Skip FSDP2's copies where a unit's shard group has a single rank (experts with ``ep * etp == world``).

FSDP2 copies such shards into the parameters that it computes with, and copies packed gradients twice
(``FSDPParamGroup.wait_for_unshard`` and ``post_backward``, ``foreach_reduce``; torch 2.13). Here the unit computes with
its shards, or casts each once to another dtype, and autograd's gradients, divided in place, become the shards'. FSDP2
has no extension point for either, so private methods are wrapped. ``parallelize`` does so on CPUs, where a gain was
measured.

``reduce_in_place`` uses public hooks alone, for GPUs, replicas (HSDP) and offloading: FSDP2's packed buffer becomes the
gradient (``set_custom_reduce_scatter``, ``set_all_reduce_hook``).
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..compat.fsdp_groups import keeping_version, parameter_groups
from ..topology.dtensor import local_tensor

__all__ = ["compute_with_shards", "keep_gradients", "keeping_casts", "reduce_in_place"]


def compute_with_shards(module: FSDPModule) -> None:
    """Make a unit whose shard group has one rank compute with its shards, or with casts of them."""
    for group in parameter_groups(module):
        group.own_shards = [_OwnShard(param) for param in group.fsdp_params]
        group.wait_for_unshard = functools.partial(_wait_for_unshard, group, group.wait_for_unshard)


@contextlib.contextmanager
def keeping_casts(model: nn.Module) -> Iterator[None]:
    """Cast each shard once inside this context, in which no weight may change, and free the casts at its end.

    No counter shows that a cast is stale: torch's fused and foreach optimizers step DTensors without a new ``_version``
    (2.13).
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in parameter_groups(module)]
    shards = [(group, shard) for group in groups for shard in getattr(group, "own_shards", ())]
    for _, shard in shards:
        shard.keeps_cast = True
    try:
        yield
    finally:
        for group, shard in shards:
            shard.forget_cast(group.is_sharded)


def _wait_for_unshard(group: Any, fsdps: Callable[[], None]) -> None:
    with contextlib.ExitStack() as unsharding:
        for shard in group.own_shards if group._all_gather_result is not None else ():
            unsharding.enter_context(shard.as_gathered())
        fsdps()


class _OwnShard:
    """Presents the shard of one ``FSDPParam`` as its all-gather output; FSDP then copies it to itself, a no-op.

    FSDP keeps the parameter that it computes with, whose data are the shard's, from one step to the next. If the shard
    moves (offloading), both are rebuilt, so that nothing holds the old memory.
    """

    def __init__(self, param: Any):
        self._param = param
        self.keeps_cast = self._is_cast = False
        self._free, self._reset = param.free_unsharded_param, param.reset_sharded_param
        param.free_unsharded_param, param.reset_sharded_param = self._free_copy, self._reset_shard

    @contextlib.contextmanager
    def as_gathered(self) -> Iterator[None]:
        """While FSDP unshards, present the shard, or its cast, as the all-gather output.

        FSDP handles shards on the host, and shards that are a part of a larger storage, which FSDP would resize.
        """
        param, shard = self._param, self._param._sharded_param_data
        is_left = type(shard) is not torch.Tensor or param.offload_to_cpu
        if not is_left and param.param_dtype is not None:
            param._sharded_param_data = self._cast(shard)
        elif not is_left and not param.all_gather_outputs and shard.untyped_storage().size() == shard.nbytes:
            param.all_gather_outputs = [shard]
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

    def forget_cast(self, is_sharded: bool) -> None:
        """Cast anew from here on, and free a cast that is not in use."""
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
        group.post_backward = functools.partial(_post_backward, group, group.post_backward, 1 / divide_by)


def _post_backward(group: Any, fsdps: Callable[..., None], scale: float, *unused: Any) -> None:
    for param in group.fsdp_params if group.reduce_grads else ():
        _keep_gradient(param, scale)
    fsdps(*unused)  # finds no gradients


@torch.no_grad()
def _keep_gradient(param: Any, scale: float) -> None:
    gradient, unsharded = None, getattr(param, "_unsharded_param", None)
    if unsharded is None:
        return
    if hasattr(param, "accumulate_unsharded_grad_if_needed"):  # torch 2.13 keeps unreduced gradients apart
        param.accumulate_unsharded_grad_if_needed()
        if param.unsharded_accumulated_grad is not None:
            gradient, param.unsharded_accumulated_grad = param.unsharded_accumulated_grad_data, None
    if gradient is None and unsharded.grad is not None:
        gradient, unsharded.grad = param.unsharded_grad_data, None
    if gradient is None:
        return
    sharded = param.sharded_param
    if sharded.grad is None:
        sharded.grad = param.to_sharded_dtensor(_scaled(gradient, scale, param.orig_dtype))
    else:
        local_tensor(sharded.grad).add_(gradient, alpha=scale)
    for hook in (sharded._post_accumulate_grad_hooks or {}).values():
        hook(sharded)


def _scaled(gradient: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Scale and cast a gradient in one pass, in place if it has ``dtype``."""
    if gradient.dtype == dtype:
        return gradient.mul_(scale)
    # A tensor with a dim, unlike a number, promotes the result to float32.
    return torch.mul(gradient, torch.tensor([scale], dtype=torch.float32, device=gradient.device)).to(dtype)


def reduce_in_place(module: FSDPModule, divide_by: float) -> None:
    """Divide the packed gradients of a unit whose shard group has one rank, in place, after FSDP's mean over
    replicas."""
    module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    buffer = _SameBuffer()
    module.set_custom_reduce_scatter(cast(Any, buffer))

    def divide(gradients: torch.Tensor) -> None:
        buffer.check_is_complete()
        if divide_by != 1:
            gradients.div_(divide_by)
        if gradients.is_cuda:  # allocated on another stream
            gradients.record_stream(torch.cuda.current_stream())

    module.set_all_reduce_hook(divide)


class _SameBuffer:
    """Replaces FSDP's reduce-scatter by one buffer as input and output, so FSDP's copy between them is a no-op.

    Only FSDP holds it: after an error between the two allocations, the next backward gets a new one.
    """

    def __init__(self) -> None:
        self._packed: Callable[[], torch.Tensor | None] = lambda: None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer as input, or the input as output; raise a ``RuntimeError`` if they differ."""
        packed = self._packed()
        if packed is None:
            packed = torch.empty(*size, dtype=dtype, device=device)
            self._packed = weakref.ref(packed)
            return packed
        self._packed = lambda: None
        if (packed.numel(), packed.dtype) != (math.prod(size), dtype):
            raise RuntimeError(
                f"FSDP packed {packed.numel()} gradients of {packed.dtype} and asks for {math.prod(size)} of {dtype} "
                f"as output: epfsdp2 does not support how torch {torch.__version__} reduces."
            )
        return packed

    def check_is_complete(self) -> None:
        """Raise a ``RuntimeError`` if an input was allocated without an output."""
        if self._packed() is not None:
            raise RuntimeError(
                "FSDP allocated an odd number of gradient buffers: a backward failed before this one, or epfsdp2 does "
                f"not support how torch {torch.__version__} reduces."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a group of one rank has nothing to reduce")
