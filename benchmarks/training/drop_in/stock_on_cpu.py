"""Lets verl's fsdp2 engine and its SGLang adapter run without a GPU; verl's workers import it as ``model.external_lib``.

A reference policy is kept in memory that is not pinned, as torch pins only beside a GPU, and tensors on the CPU reach
SGLang by the shim that this engine's adapter has.
"""

from torch.distributed.fsdp import CPUOffloadPolicy
from verl.workers.engine.fsdp import transformer_impl

from epfsdp2.rollout.sglang import cpu_shim


def _unpinned(pin_memory: bool) -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False)


transformer_impl.CPUOffloadPolicy = _unpinned
cpu_shim.install()
