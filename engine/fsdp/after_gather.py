"""Change parameters that FSDP2 has gathered before a module computes with them.

FSDP2's extension point for this is a subclass of tensor as the parameter (``fsdp_post_all_gather``), which optimizers,
checkpoints and weight syncs would meet as well. So the method is wrapped that ends an all-gather, of the parameter
groups concerned alone. What is changed is FSDP's gathered copy, in forward and, where that was freed, again in
backward: shards stay as they are, no memory is needed, and the gradient is that of the changed values.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..compat.fsdp_groups import parameter_groups
from .single_rank import compute_with_copies

__all__ = ["after_gather"]


def after_gather(model: nn.Module, names: Collection[str], change: Callable[[torch.Tensor], None]) -> None:
    """Have ``change`` called, without gradients, with each gathered parameter, which it overwrites.

    Args:
        model: sharded; no other thing may wrap the same groups.
        names: of parameters. Of experts ``change`` is given those of this rank.

    Raises:
        RuntimeError: torch gathers parameters in another way than this was made for.
        MissingNameError: torch has what this changes under other names.
    """
    wanted = {id(model.get_parameter(name)): name for name in names}
    for module in model.modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            own = [param for param in group.fsdp_params if wanted.pop(id(param.sharded_param), None)]
            if own:
                _wrap(group, own, change)
    if wanted:
        raise RuntimeError(f"torch {torch.__version__} has no gathered {', '.join(wanted.values())}.")


def _wrap(group: Any, params: list[Any], change: Callable[[torch.Tensor], None]) -> None:
    compute_with_copies(group)
    gathers = group.wait_for_unshard

    def wait_for_unshard() -> None:
        was_unsharded = group.is_unsharded
        gathers()
        if was_unsharded or not group.is_unsharded:
            return
        with torch.no_grad():
            for param in params:
                gathered = param.unsharded_param
                values = (gathered.to_local() if isinstance(gathered, DTensor) else gathered).data
                if values.untyped_storage().data_ptr() == param._sharded_param_data.untyped_storage().data_ptr():
                    raise RuntimeError(
                        f"torch {torch.__version__} computes with shards where it has nothing to gather."
                    )
                change(values)  # as .data: autograd would take this for a change of what it has saved

    group.wait_for_unshard = wait_for_unshard
