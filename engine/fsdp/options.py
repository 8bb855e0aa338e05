"""Options of sharding, for ``parallelize`` and the planner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .activation_checkpoint import Checkpointing

__all__ = ["ShardingOptions"]


@dataclass(frozen=True)
class ShardingOptions:
    """Options of ``parallelize``.

    Most are settings of the same name (``config/settings.py``). The others:

    Args:
        param_dtype: dtype of the gathered parameters and of the compute.
        reduce_dtype: dtype of the gradient reduction.
        dispatch_chunks, overlap_shared_experts: the settings' values, or automatic ones (``config/automatic.py``).
        activation_offload: keep the inputs of recomputed layers on the host.
        head_in_root: keep the head in the root's unit, for code that reads its weight without calling it (fused linear
            cross-entropy).
    """

    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    fp32_modules: Sequence[str] = ()
    reshard_after_forward: bool = True
    reshard_experts_after_forward: bool | None = None
    prefetch_depth: int = 1
    expert_shard_dim: int | str = "auto"
    expert_plan: Mapping[str, int] | None = None
    dispatch_chunks: int = 1
    overlap_shared_experts: bool = False
    dispatcher: str = "all_to_all"
    experts_backend: str = "auto"
    communication_sms: int = -1
    checkpointing: Checkpointing = "none"
    activation_offload: bool = False
    compile_dense: bool = False
    fuse_dense: bool = True
    freeze_vision_tower: bool = False
    head_in_root: bool = False
    chunked_logits: bool = True
    cpu_offload: bool = False
    keep_casts: bool = False
    batch_invariant: bool = False
