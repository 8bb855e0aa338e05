"""Find the parameters that FSDP2 gathers together, which torch has under private names."""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from .private_names import MissingNameError

__all__ = ["parameter_groups"]


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Return the ``FSDPParamGroup``s that a module's forward gathers; none where it has no parameters of its own.

    Raises:
        MissingNameError: this torch keeps them elsewhere.
    """
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # since torch 2.12
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    raise MissingNameError(f"torch {torch.__version__} has no FSDPState._fsdp_param_groups, which epfsdp2 needs.")
