"""The recipe: experts over ``ep``, then FSDP2 bottom-up, then prefetch.

    for each layer:
        experts   -> Shard(0) over ep, then fully_shard over ep_fsdp
        layer     -> fully_shard over fsdp
    model         -> fully_shard over fsdp

The experts are FSDP modules of their own, and dispatch and combine run inside their forward. So both all-to-alls of a
backward have been launched when FSDP launches that module's reduce-scatter: no rank can see them interleaved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from .errors import SettingError
from .experts.compute import EXPERTS_IMPLEMENTATION, ExpertParallel, attach
from .experts.find import ExpertsInfo, find_experts
from .mesh import Meshes

__all__ = ["ShardingOptions", "check_experts_divide", "layer_names", "parallelize", "reshard_all"]


@dataclass(frozen=True)
class ShardingOptions:
    """How ``parallelize`` shards.

    Args:
        param_dtype: dtype of the gathered parameters and of the compute.
        reduce_dtype: dtype of the gradient reduction.
        reshard_after_forward: free gathered parameters between forward and backward.
        prefetch_depth: how many layers ahead are gathered while one computes, forward and backward; 0 for none.
        expert_shard_dim: dim of an expert weight that ``ep_fsdp`` cuts: 0 (whole experts), 1, or ``"auto"``.
        cpu_offload: FSDP2's CPU offload policy.
    """

    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True
    prefetch_depth: int = 1
    expert_shard_dim: int | str = "auto"
    cpu_offload: bool = False


@dataclass
class _Block:
    """What is gathered for one layer, in the order in which its forward needs it."""

    layer: nn.Module
    experts: list[nn.Module] = field(default_factory=list)

    @property
    def fsdp_modules(self) -> list[FSDPModule]:
        return [m for m in (self.layer, *self.experts) if isinstance(m, FSDPModule)]


def parallelize(model: Any, meshes: Meshes, options: ShardingOptions) -> nn.Module:
    """Shard ``model`` in place over ``meshes`` and return it, an ``FSDPModule``.

    The model may be on the meta device. Its experts are computed by ``experts_forward`` from here on.

    Raises:
        UnsupportedModelError: if it has no experts that can be dispatched.
        SettingError: if the expert-parallel size does not divide the number of experts, or the wanted shard dim does
            not divide.
    """
    experts = find_experts(model)
    check_experts_divide([e.num_experts for e in experts], meshes.topology.ep)
    layers = _blocks(model, experts)

    for info in experts:
        _shard_over_ep(info, meshes)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)

    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if options.cpu_offload else OffloadPolicy()
    # Routing weights may be float32 on purpose: the experts cast their hidden states themselves.
    expert_precision = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype, cast_forward_inputs=False)
    precision = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype)
    common: dict[str, Any] = {"reshard_after_forward": options.reshard_after_forward, "offload_policy": offload}

    for info in experts:
        fully_shard(
            info.module,
            mesh=meshes.experts_shard,
            mp_policy=expert_precision,
            shard_placement_fn=lambda p: expert_placement(
                p.shape, meshes.topology.ep, meshes.topology.ep_fsdp, options.expert_shard_dim
            ),
            **common,
        )
    for block in layers:
        fully_shard(block.layer, mesh=meshes.dense_shard, mp_policy=precision, **common)
    # The root decides for itself: it keeps its own parameters between forward and backward, which fused linear
    # cross-entropy kernels need (they save lm_head.weight for backward).
    fully_shard(model, mesh=meshes.dense_shard, mp_policy=precision, offload_policy=offload)

    _divide_gradients(model, {e.module for e in experts}, meshes)
    _prefetch(layers, options.prefetch_depth)
    return model


def reshard_all(model: nn.Module) -> None:
    """Free every gathered parameter; ``FSDPModule.reshard`` alone frees one module's."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_experts_divide(num_experts: Sequence[int], ep: int) -> None:
    """Refuse an expert-parallel size that would split an expert.

    Raises:
        SettingError: with the sizes that work for all experts modules of the model.
    """
    for n in sorted(set(num_experts)):
        if n % ep:
            works = [d for d in range(1, n + 1) if all(m % d == 0 for m in num_experts)]
            raise SettingError(
                "engine.ep_size", ep, f"has to divide the model's number of experts, {n}.", f"engine.ep_size={works}"
            )


def layer_names(model: nn.Module) -> list[str]:
    """FQNs of the model's layers, in order: the modules of a class in its ``_no_split_modules``."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    # fully_shard puts a subclass in front of a module's own class.
    return [fqn for fqn, m in model.named_modules() if classes & {c.__name__ for c in type(m).__mro__}]


def _blocks(model: nn.Module, experts: Sequence[ExpertsInfo]) -> list[_Block]:
    """The layers in order, each with the experts modules inside it."""
    return [
        _Block(model.get_submodule(fqn), [e.module for e in experts if e.fqn == fqn or e.fqn.startswith(fqn + ".")])
        for fqn in layer_names(model)
    ]


def expert_placement(shape: Sequence[int], ep: int, ep_fsdp: int, dim: int | str) -> Shard:
    """Where ``ep_fsdp`` cuts an expert parameter of global ``shape`` ``[E, ...]``.

    ``auto`` takes the first of dims 1, 2, ... that divides (dim 1 as in VeOmni: no tie between the number of experts
    and the number of ranks), else dim 0, which alone may be cut unevenly (torch ``_fsdp_param.py``).

    Raises:
        SettingError: for an explicit dim that does not divide.
    """
    local = [shape[0] // ep, *shape[1:]]
    if dim == "auto":
        return Shard(next((d for d in range(1, len(local)) if local[d] % ep_fsdp == 0), 0))
    dim = int(dim)
    if local[dim] % ep_fsdp:
        raise SettingError(
            "engine.expert_shard_dim",
            dim,
            f"an expert weight has {local[dim]} along it on one EP rank, which ep_fsdp={ep_fsdp} does not divide.",
            "engine.expert_shard_dim=auto",
        )
    return Shard(dim)


def _shard_over_ep(info: ExpertsInfo, meshes: Meshes) -> None:
    """Make every stacked parameter of an experts module a DTensor of its full shape, ``Shard(0)`` over ``ep``."""
    for name, param in list(info.module.named_parameters(recurse=False)):
        if param.shape[0] != info.num_experts:
            continue
        # No source rank: each rank cuts what it has (nothing yet, on the meta device).
        sharded = distribute_tensor(param.detach(), meshes.ep, [Shard(0)], src_data_rank=None)
        info.module.register_parameter(name, nn.Parameter(sharded, requires_grad=param.requires_grad))
    group = meshes.ep.get_group() if meshes.topology.ep > 1 else None
    attach(info.module, ExpertParallel(info.num_experts, group))


def _divide_gradients(model: nn.Module, experts: set[nn.Module], meshes: Meshes) -> None:
    """Give every FSDP module the one factor that the gradient is divided by: the ranks the loss is averaged over.

    By default FSDP divides by the size of a module's own mesh. For experts that is ``world / ep``, while the backward
    all-to-all has already summed over ``ep``: they would come out ``ep`` times too large.
    """
    world = float(meshes.topology.world)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_gradient_divide_factor(world)
        # gloo has no PREMUL_SUM. With plain sums torch 2.13 divides twice where the shard group has one rank
        # (_fsdp_collectives.py: once in the world_size == 1 branch, once as post factor), so not there.
        shard_ranks = meshes.topology.ep_fsdp if module in experts else meshes.topology.fsdp
        if meshes.dense.device_type == "cpu" and shard_ranks > 1:
            module.set_force_sum_reduction_for_comms(True)


def _prefetch(layers: Sequence[_Block], depth: int) -> None:
    """Gather the next ``depth`` layers while one computes, dense parameters before experts, both ways."""
    if depth == 0:
        return
    for i, block in enumerate(layers):
        following = layers[i + 1 : i + 1 + depth]
        preceding = layers[max(0, i - depth) : i][::-1]
        if isinstance(block.layer, FSDPModule):
            block.layer.set_modules_to_forward_prefetch([m for b in following for m in b.fsdp_modules])
            block.layer.set_modules_to_backward_prefetch([m for b in preceding for m in b.fsdp_modules])
