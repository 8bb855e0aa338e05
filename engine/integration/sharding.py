"""How a model is sharded, as the engine's settings and verl's say it."""

from typing import Any, cast

from verl.utils.torch_dtypes import PrecisionType

from ..fsdp.activation_checkpoint import Checkpointing
from ..fsdp.options import ShardingOptions

__all__ = ["sharding_options"]


def sharding_options(config: Any, model: Any) -> ShardingOptions:
    """What ``parallelize`` is told.

    Args:
        config: the engine's settings.
        model: verl's settings of the model.
    """
    precision = config.mixed_precision or {}
    return ShardingOptions(
        param_dtype=PrecisionType.to_dtype(precision.get("param_dtype", config.dtype)),
        reduce_dtype=PrecisionType.to_dtype(precision.get("reduce_dtype", "fp32")),
        fp32_modules=config.fp32_modules,
        reshard_after_forward=config.reshard_after_forward,
        reshard_experts_after_forward=config.reshard_experts_after_forward,
        prefetch_depth=config.prefetch_depth,
        expert_shard_dim=config.expert_shard_dim,
        expert_plan=config.expert_plan or {},
        dispatch_chunks=config.dispatch_chunks,
        overlap_shared_experts=config.overlap_shared_experts,
        dispatcher=config.dispatcher,
        experts_backend=config.experts_backend,
        checkpointing=_checkpointing(config, model),
        activation_offload=model.enable_activation_offload,
        compile_dense=config.compile_dense,
        head_in_root=model.use_fused_kernels,
        cpu_offload=config.offload_policy,
    )


def _checkpointing(config: Any, model: Any) -> Checkpointing:
    setting = config.activation_checkpointing
    if setting == "auto":
        return "full" if model.enable_gradient_checkpointing else "none"
    return cast(Checkpointing, setting)
