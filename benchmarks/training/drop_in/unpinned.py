"""Lets verl's fsdp2 engine keep a reference policy in memory that is not pinned: torch pins only beside a GPU.

verl's workers import this module as ``model.external_lib``.
"""

from torch.distributed.fsdp import CPUOffloadPolicy
from verl.workers.engine.fsdp import transformer_impl


def _unpinned(pin_memory: bool) -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False)


transformer_impl.CPUOffloadPolicy = _unpinned
