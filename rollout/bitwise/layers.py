"""vLLM's layers with the operators of the trainer, which runs transformers' code.

vLLM replaces its classes by those that are registered under their names (``register_oot``). Rows are padded
as the trainer's are.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from ...engine.head.log_probs import whole_logits
from ...engine.moe.dispatch import start_dispatch_plans
from ...engine.moe.gemm.backends import Groups, inverse
from ...engine.moe.gemm.gate import Gate
from ...engine.moe.gemm.invariant import InvariantBackend, padded

__all__ = ["register"]

_LINEARS = ("QKVParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear")
_BACKEND, _SWIGLU = InvariantBackend(), Gate(1.0, 0.0, torch.inf, False)


def register() -> None:
    """Replace vLLM's classes in models that are built later; once per process."""
    if "RMSNorm" in op_registry_oot:
        return
    for name in _LINEARS:
        stock = getattr(linear, name)
        own = _RowParallel if name == "RowParallelLinear" else _Linear
        stock.register_oot(type(f"Bitwise{name}", (own, stock), {}), name=name)
    for stock, own in (
        (RMSNorm, _Norm),
        (SiluAndMul, _Activation),
        (RotaryEmbedding, _Rotary),
        (UnquantizedFusedMoEMethod, _Experts),
        (LogitsProcessor, _Logits),
    ):
        stock.register_oot(own, name=stock.__name__)


class _Products(linear.UnquantizedLinearMethod):
    """One product for each of the weights that a checkpoint has: of a wider one, columns may sum in another order."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weight as it was loaded, where vLLM's CPU build packs it."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows, sizes = padded(x), getattr(layer, "output_partition_sizes", None) or [len(layer.weight)]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        parts = [functional.linear(rows, *pair) for pair in zip(layer.weight.split(sizes), biases, strict=True)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))[: len(x)]


class _Linear:
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.quant_method = _Products()


class _RowParallel(_Linear):
    tp_size: int  # vLLM's names
    reduce_results: bool

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.sums, self.reduce_results = self.reduce_results and self.tp_size > 1, False

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)  # type: ignore[misc]
        if not self.sums:
            return found
        return (_summed(found[0]), *found[1:]) if isinstance(found, tuple) else _summed(found)


def _summed(product: torch.Tensor) -> torch.Tensor:
    """Sum the products of tensor-parallel workers in their order, as the trainer does."""
    parts = tensor_model_parallel_all_gather(product, dim=0).chunk(get_tensor_model_parallel_world_size())
    return functools.reduce(torch.add, parts)


class _Norm(RMSNorm):
    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is not None:
            x = residual = residual + x
        wide = padded(x).float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        out = (self.weight * wide.to(x.dtype))[: len(x)]
        return out if residual is None else (out, residual)

    forward_cpu = forward_native


class _Activation(SiluAndMul):
    def forward_native(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        gate, up = (padded(half) for half in x.chunk(2, dim=-1))
        return (functional.silu(gate) * up)[: len(x)]

    forward_cpu = forward_native


class _Rotary(RotaryEmbedding):
    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None, **_: Any
    ) -> Any:
        cos, sin = (torch.cat((half, half), dim=-1)[:, None] for half in self.cos_sin_cache[positions].chunk(2, dim=-1))

        def rotate(x: torch.Tensor) -> torch.Tensor:
            heads = x.view(len(x), -1, self.head_size)
            a, b = heads.chunk(2, dim=-1)
            return (heads * cos + torch.cat((-b, a), dim=-1) * sin).view(x.shape)

        return rotate(query), None if key is None else rotate(key)

    forward_cpu = forward_native


class _Experts(UnquantizedFusedMoEMethod):
    """The router and the experts of Qwen3-MoE, by the operators of ``engine/moe``."""

    is_monolithic = True  # it routes
    record_routes: Callable[[torch.Tensor], None] | None = None  # set where vLLM returns routes (engine/cpu/vllm.py)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weights as they were loaded, where vLLM's CPU build packs them."""

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        scores = torch.softmax(padded(router_logits), dim=-1, dtype=torch.float32)
        weights, experts = torch.topk(scores, layer.top_k, dim=-1)
        if layer.renormalize:
            weights /= weights.sum(dim=-1, keepdim=True)
        weights, experts = weights[: len(x)].to(router_logits.dtype), experts[: len(x)]
        if self.record_routes is not None:
            self.record_routes(experts)
        (plan,) = start_dispatch_plans(experts, len(layer.w13_weight), None).wait()
        groups = Groups(plan.counts_e, plan.rows)
        rows = _BACKEND.take(x, plan.slot_order // layer.top_k)
        act = _BACKEND.activate(_BACKEND.mm(rows, layer.w13_weight.mT, groups), _SWIGLU)
        out = _BACKEND.mm(act, layer.w2_weight.mT, groups)
        if get_tensor_model_parallel_world_size() > 1:
            out = _summed(out)
        found = _BACKEND.gather_sum(out, inverse(plan.slot_order).view_as(experts), weights, x.dtype)
        # vLLM sums what its workers return, which is whole already.
        return found if get_tensor_model_parallel_rank() == 0 else torch.zeros_like(found)


class _Logits(LogitsProcessor):
    def _apply_head(
        self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight = lm_head.weight[: self.org_vocab_size]
        return whole_logits(padded(hidden_states), weight, embedding_bias)[: len(hidden_states)]
