"""How a model is sharded: what ``parallelize`` is told, and what the planner counts with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .activation_checkpoint import Checkpointing

__all__ = ["ShardingOptions"]


@dataclass(frozen=True)
class ShardingOptions:
    """How ``parallelize`` shards.

    Args:
        param_dtype: dtype of the gathered parameters and of the compute.
        reduce_dtype: dtype of the gradient reduction.
        fp32_modules: FQN patterns of modules that compute in float32 (``fsdp/fp32_modules.py``).
        reshard_after_forward: free gathered parameters between forward and backward.
        reshard_experts_after_forward: the same for the experts alone; ``None`` for as the rest.
        prefetch_depth: how many stages ahead are gathered while one computes, forward and backward; 0 for none. A
            stage is a layer, the input embeddings, or the head.
        expert_shard_dim: dim of an expert weight that ``ep_fsdp`` cuts: 0 (whole experts), 1, or ``"auto"``.
        expert_plan: where the experts of a model of the user's own are (``find_experts``).
        dispatch_chunks: parts in which a layer's tokens are dispatched, one while another computes.
        overlap_shared_experts: compute a block's shared experts while its tokens are dispatched.
        dispatcher: what brings tokens to their experts, one of ``deepep.DISPATCHERS``.
        experts_backend: what computes the experts (``moe/gemm/backends.py``).
        checkpointing: which activations are computed again in backward (``fsdp/activation_checkpoint.py``).
        activation_offload: keep on the host what is kept of them for that.
        compile_dense: ``torch.compile`` the parts of the layers without experts.
        head_in_root: leave the head to the root, for code that reads its weight without calling it (fused linear
            cross-entropy).
        cpu_offload: FSDP2's CPU offload policy.
    """

    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    fp32_modules: Sequence[str] = ()
    reshard_after_forward: bool = True
    reshard_experts_after_forward: bool | None = None
    prefetch_depth: int = 1
    expert_shard_dim: int | str = "auto"
    expert_plan: Mapping[str, int] = field(default_factory=dict)
    dispatch_chunks: int = 1
    overlap_shared_experts: bool = False
    dispatcher: str = "all_to_all"
    experts_backend: str = "auto"
    checkpointing: Checkpointing = "none"
    activation_offload: bool = False
    compile_dense: bool = False
    head_in_root: bool = False
    cpu_offload: bool = False
