"""Change or free parameters that FSDP2 has gathered.

FSDP2's extension point for a change is a tensor subclass as the parameter (``fsdp_post_all_gather``), which optimizers,
checkpoints and weight syncs would meet too. Instead the end of the all-gather is wrapped. Only FSDP's gathered copy
changes, in forward and, if it was freed, again in backward. The gradient is that of the changed values.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..compat.fsdp_groups import parameter_groups
from ..topology.dtensor import local_tensor

__all__ = ["after_gather", "reshard_all"]


def reshard_all(model: nn.Module) -> None:
    """Free every gathered parameter; ``FSDPModule.reshard`` alone frees one module's."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def after_gather(model: nn.Module, names: Collection[str], change: Callable[[torch.Tensor], None]) -> None:
    """Call ``change``, without gradients, with each gathered parameter, which it overwrites.

    It gets this rank's experts of an expert parameter.

    Raises:
        RuntimeError: torch does not gather one of the parameters.
        MissingNameError: torch has renamed a wrapped method.
    """
    wanted = {id(model.get_parameter(name)): name for name in names}
    for module in model.modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            own = [param for param in group.fsdp_params if wanted.pop(id(param.sharded_param), None)]
            if own:
                group.own_shards = []  # ``change`` must not overwrite shards (``single_rank.py``)
                group.wait_for_unshard = functools.partial(_wait, group, group.wait_for_unshard, own, change)
    if wanted:
        raise RuntimeError(f"torch {torch.__version__} has no gathered {', '.join(wanted.values())}.")


def _wait(group: Any, gathers: Callable[[], None], params: list[Any], change: Callable[[torch.Tensor], None]) -> None:
    was_unsharded = group.is_unsharded
    gathers()
    with torch.no_grad():
        for param in params if group.is_unsharded and not was_unsharded else ():
            values = local_tensor(param.unsharded_param).data  # autograd must not see a change of a saved tensor
            if values.untyped_storage().data_ptr() == param._sharded_param_data.untyped_storage().data_ptr():
                raise RuntimeError(f"torch {torch.__version__} computes with shards in a group of one rank.")
            change(values)
