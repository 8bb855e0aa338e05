"""vLLM's worker extension for verl's FP8 loader on a CPU, where vLLM frees the routers that it has packed."""

from vllm.model_executor.layers import utils

from epfsdp2.rollout.vllm.worker import WeightSyncExtension

__all__ = ["KeepsRouters"]

_dispatch = utils.dispatch_cpu_unquantized_gemm
utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: _dispatch(layer, remove_weight=False)


class KeepsRouters(WeightSyncExtension):
    """``WeightSyncExtension`` in a vLLM that keeps what verl's loader writes to."""
