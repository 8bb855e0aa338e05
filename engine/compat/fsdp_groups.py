"""Find the parameters that FSDP2 gathers together, which torch has under private names."""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from .private_names import MissingNameError

__all__ = ["parameter_groups"]

# What ``fsdp/single_rank.py`` and ``fsdp/after_gather.py`` wrap or read.
_GROUP = ("fsdp_params", "wait_for_unshard", "post_backward", "_all_gather_result", "reduce_grads")
_PARAM = ("all_gather_outputs", "free_unsharded_param", "reset_sharded_param", "_sharded_param_data", "sharded_param")


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Return the ``FSDPParamGroup``s that a module's forward gathers; none where it has no parameters of its own.

    Raises:
        MissingNameError: this torch keeps them elsewhere, or has parts of them under other names.
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
    for name in names:
        if not hasattr(part, name):
            raise _missing(f"{type(part).__name__}.{name}")


def _missing(name: str) -> MissingNameError:
    return MissingNameError(f"torch {torch.__version__} has no {name}, which epfsdp2 needs.")
