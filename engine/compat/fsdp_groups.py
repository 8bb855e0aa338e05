"""Find FSDP2's parameter groups, which torch keeps under private names."""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from .private_names import MissingNameError, look_up

__all__ = ["keeping_version", "parameter_groups"]

# A context manager: autograd does not see writes to the tensor inside of it as changes of saved tensors.
keeping_version = look_up("torch.autograd:_unsafe_preserve_version_counter", known="2.11 to 2.15")
# The attributes that ``fsdp/single_rank.py`` and ``fsdp/after_gather.py`` wrap, call or read.
_GROUP = ("fsdp_params", "wait_for_unshard", "post_backward", "_all_gather_result", "reduce_grads", "is_sharded")
_PARAM = (
    *("all_gather_outputs", "init_all_gather_outputs", "alloc_all_gather_outputs", "free_unsharded_param"),
    *("reset_sharded_param", "to_sharded_dtensor", "sharded_param", "_sharded_param_data", "_unsharded_param"),
    *("unsharded_grad_data", "param_dtype", "reduce_dtype", "orig_dtype", "offload_to_cpu"),
)


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Return the ``FSDPParamGroup``s that a module's forward gathers; none if it has no parameters of its own.

    Raises:
        MissingNameError: this torch has other names for them or their attributes.
    """
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # since torch 2.12
        groups = list(state._fsdp_param_groups)
    elif hasattr(state, "_fsdp_param_group"):
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    else:
        raise _missing("FSDPState._fsdp_param_groups")
    for group in groups:
        _check(group, _GROUP)
        _check(group.fsdp_params[0], _PARAM)
    return groups


def _check(part: Any, names: tuple[str, ...]) -> None:
    cls = type(part)
    for name in names:  # on the class if possible: some are set, or readable, only during a step
        if not (name in cls.__annotations__ or hasattr(cls, name) or hasattr(part, name)):
            raise _missing(f"{cls.__name__}.{name}")


def _missing(name: str) -> MissingNameError:
    return MissingNameError(f"torch {torch.__version__} has no {name}, which epfsdp2 needs.")
