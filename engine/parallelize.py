"""The recipe: experts over ``ep``, then FSDP2 bottom-up, then prefetch.

    for each layer:
        experts       -> cut over ep, then fully_shard over ep_fsdp
        islands       -> fully_shard over fsdp, in float32; correction biases stay whole
        layer         -> fully_shard over fsdp
    embeddings, head  -> fully_shard over fsdp
    model             -> fully_shard over fsdp

The experts are FSDP modules of their own, and dispatch and combine run inside their forward. So both all-to-alls of a
backward have been launched when FSDP launches that module's reduce-scatter: no rank can see them interleaved.

A dense model has no experts, and its ``ep`` is 1: plain FSDP2, by the same steps.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from .fsdp.activation_checkpoint import checkpoint_layers
from .fsdp.compile import compile_dense_parts
from .fsdp.fp32_modules import Island, correction_biases, find_islands, mixing_buffers
from .fsdp.options import ShardingOptions
from .fsdp.single_rank_reduce import reduce_in_place
from .fsdp.wrap_plan import Ends
from .model.layers import layer_names
from .moe import deepep, overlap
from .moe.find import CustomExperts, ExpertsInfo, find_experts
from .moe.forward import EXPERTS_IMPLEMENTATION, ExpertsRuntime, attach
from .moe.gemm.backends import backend_named, choose_backend
from .moe.overlap import check_overlap
from .moe.shared_experts import SharedExperts
from .topology.expert_placement import check_experts_divide, ep_fsdp_dim, model_parallel_placements
from .topology.mesh import Meshes

__all__ = ["parallelize"]

logger = logging.getLogger("epfsdp2")


def parallelize(model: Any, meshes: Meshes, options: ShardingOptions) -> nn.Module:
    """Shard ``model`` in place over ``meshes`` and return it, an ``FSDPModule``.

    The model may be on the meta device. Its experts are computed by ``experts_forward`` from here on.

    Raises:
        UnsupportedModelError: if it has experts that can't be dispatched.
        SettingError: if the expert-parallel size does not divide the number of experts, the wanted shard dim does not
            divide, the experts' backend can't run here, a pattern matches nothing, or there is nothing of what should
            overlap.
    """
    topology = meshes.topology
    experts = find_experts(model, options.expert_plan)
    check_experts_divide([e.num_experts for e in experts], topology, type(model).__name__)
    stacks = {e.module for e in experts}
    layers = {fqn: model.get_submodule(fqn) for fqn in layer_names(model)}

    backend = choose_backend(options.experts_backend, meshes.dense.device_type, options.param_dtype).name
    for info in experts:
        _shard_over_ep(info, meshes)
        _attach(info, model, meshes, options, backend)
    if any(not isinstance(module, CustomExperts) for module in stacks):
        model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    if options.param_dtype != torch.float32:
        autocast = torch.autocast(meshes.dense.device_type, options.param_dtype)
        mixing = mixing_buffers(model, stacks)
        for module in mixing:
            module.forward = autocast(module.forward)  # type: ignore[method-assign]
        if mixing and dist.get_rank() == 0:
            logger.warning(
                "epfsdp2: %s multiplies float32 buffers of its own, so it runs under autocast to %s (%d modules)",
                " and ".join(sorted({type(module).__name__ for module in mixing})),
                options.param_dtype,
                len(mixing),
            )
    if options.compile_dense:
        compile_dense_parts(layers.values(), stacks)
    most = max((e.num_experts for e in experts), default=0)
    checkpoint_layers(layers.values(), stacks, most, options.checkpointing, options.activation_offload)

    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if options.cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype)
    wrap = functools.partial(
        fully_shard,
        mesh=meshes.dense_shard,
        mp_policy=precision,
        offload_policy=offload,
        ignored_params=correction_biases(model, {e.num_experts for e in experts}),
    )
    for info in experts:
        _wrap_experts(info, meshes, options, offload)
    if {options.param_dtype, *(p.dtype for p in model.parameters())} != {torch.float32}:
        for island in find_islands(model, [e.module for e in experts], options.fp32_modules):
            _wrap_island(island, wrap, options)
    for layer in layers.values():
        if not isinstance(layer, FSDPModule):  # a whole layer may be an island
            wrap(layer, reshard_after_forward=options.reshard_after_forward)
    ends = Ends.of(model, options.head_in_root)
    if ends.embeddings is not None:
        wrap(ends.embeddings, reshard_after_forward=options.reshard_after_forward)
        if isinstance(ends.embeddings, nn.Embedding):
            cast(FSDPModule, ends.embeddings).set_unshard_in_backward(False)  # their gradient does not read them
    if ends.head is not None:
        # Its backward comes right after its forward.
        wrap(ends.head, reshard_after_forward=False)
    # The root decides for itself: it keeps its own parameters between forward and backward, which fused linear
    # cross-entropy kernels need (they save lm_head.weight for backward).
    wrap(model)

    _divide_gradients(model, stacks, meshes, options.reduce_dtype)
    if options.prefetch_depth:
        _prefetch(model, ends, layers, stacks, options.prefetch_depth)
    return model


def _wrap_experts(info: ExpertsInfo, meshes: Meshes, options: ShardingOptions, offload: OffloadPolicy) -> None:
    ep_dim = {info.module.get_parameter(name): dim for name, dim in info.ep_dims.items()}

    def placement(param: nn.Parameter) -> Shard:
        dim = ep_fsdp_dim(param.shape, meshes.topology, options.expert_shard_dim, ep_dim.get(param, 0))
        return Shard(dim)

    reshard = options.reshard_experts_after_forward
    fully_shard(
        info.module,
        mesh=meshes.experts_shard,
        # Routing weights may be float32 on purpose: the experts cast their hidden states themselves.
        mp_policy=MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype, cast_forward_inputs=False),
        offload_policy=offload,
        reshard_after_forward=options.reshard_after_forward if reshard is None else reshard,
        shard_placement_fn=placement,
    )


def _wrap_island(island: Island, wrap: Callable[..., Any], options: ShardingOptions) -> None:
    if not island.casts_inputs:
        island.module.register_forward_hook(_norms_keep_the_dtype)
    if island.mainland:
        wrap(list(island.mainland), reshard_after_forward=options.reshard_after_forward)
    precision = MixedPrecisionPolicy(torch.float32, options.reduce_dtype, cast_forward_inputs=island.casts_inputs)
    wrap(island.module, mp_policy=precision, reshard_after_forward=options.reshard_after_forward)


def _shard_over_ep(info: ExpertsInfo, meshes: Meshes) -> None:
    """Make every stacked parameter of an experts module a DTensor of its full shape, cut over ``ep``."""
    mesh = meshes.model_parallel
    for name, ep_dim in info.ep_dims.items():
        param = info.module.get_parameter(name)
        placements = model_parallel_placements(meshes.topology.model_parallel_axes, ep_dim)
        # No source rank: each rank cuts what it has (nothing yet, on the meta device).
        sharded = distribute_tensor(param.detach(), mesh, placements, src_data_rank=None)
        info.module.register_parameter(name, nn.Parameter(sharded, requires_grad=param.requires_grad))


def _attach(info: ExpertsInfo, model: nn.Module, meshes: Meshes, options: ShardingOptions, backend: str) -> None:
    """Tell an experts module how its experts are spread, and what brings tokens to them."""
    chunks, exchange = options.dispatch_chunks, None
    check_overlap(chunks, options.overlap_shared_experts, options.dispatcher, model, [info])
    group = meshes.ep.get_group() if meshes.topology.ep > 1 else None
    if group is not None and options.dispatcher == "deepep":
        exchange = functools.partial(deepep.exchange, num_experts=info.num_experts, group=group)
    elif group is not None and (chunks > 1 or options.overlap_shared_experts):
        block = model.get_submodule(info.fqn.rpartition(".")[0])
        shared = SharedExperts(block, info.module) if options.overlap_shared_experts else None
        moves = backend_named("torch" if backend == "reference" else backend)
        exchange = functools.partial(
            overlap.exchange,
            num_experts=info.num_experts,
            group=group,
            backend=moves,
            chunks=chunks,
            shared=shared,
        )
    attach(info.module, ExpertsRuntime(info.num_experts, group, backend, exchange))


def _divide_gradients(
    model: nn.Module, experts: Iterable[nn.Module], meshes: Meshes, reduce_dtype: torch.dtype
) -> None:
    """Give every FSDP module the one factor that the gradient is divided by: the ranks the loss is averaged over.

    By default FSDP divides by the size of a module's own mesh. For experts that is ``world / ep``, while the backward
    all-to-all has already summed over ``ep``: they would come out ``ep`` times too large.
    """
    topology = meshes.topology
    # FSDP divides by PREMUL_SUM, which NCCL alone has, and which its float16 and bfloat16 kernels get a factor of zero
    # for (pytorch#190745).
    premultiplies = meshes.dense.device_type == "cuda" and reduce_dtype == torch.float32
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if (topology.ep_fsdp if module in experts else topology.fsdp) == 1:
            reduce_in_place(module, topology.world / topology.dp_replicate)
            continue
        module.set_gradient_divide_factor(float(topology.world))
        if not premultiplies:
            module.set_force_sum_reduction_for_comms(True)


def _norms_keep_the_dtype(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """A float32 weight makes some families' norms return float32, which the next linear can't take (DeepSeek-V4)."""
    like = args[0] if args else None
    if isinstance(output, torch.Tensor) and isinstance(like, torch.Tensor) and output.shape == like.shape:
        return output.to(like.dtype)
    return output


def _prefetch(
    model: nn.Module, ends: Ends, layers: Mapping[str, nn.Module], experts: Iterable[nn.Module], depth: int
) -> None:
    """Gather the next ``depth`` units while one computes, dense parameters before experts, both ways.

    Units run root, embeddings, layers, head. The layers of a vision tower may be left out by a batch, so they are a
    chain of their own: what is gathered ahead must be sure to be used.
    """
    stacks = set(experts)
    lists: dict[str, list[nn.Module]] = {}
    for fqn, layer in layers.items():
        lists.setdefault(fqn.rpartition(".")[0], []).append(layer)
    main = _decoder(model, list(lists.values()), stacks)
    for chain in lists.values():
        if chain is not main:
            _chain(chain, chain[::-1], stacks, depth)
    first, last = ([m] if m is not None else [] for m in (ends.embeddings, ends.head))
    # The root comes first in backward too; and the gradient of embeddings reads no weight.
    _chain([model, *first, *main, *last], [model, *last, *main[::-1]], stacks, depth)


def _decoder(model: Any, lists: Sequence[list[nn.Module]], experts: set[nn.Module]) -> list[nn.Module]:
    """The layers that every batch runs: those with experts, or of a dense model those of its language model."""
    if not experts and len(lists) > 1:
        decoder = set(model.get_decoder().modules())
        return next((chain for chain in lists if decoder.issuperset(chain)), [])
    return next((chain for chain in lists if not experts or any(experts & set(m.modules()) for m in chain)), [])


def _chain(forward: Sequence[nn.Module], backward: Sequence[nn.Module], experts: set[nn.Module], depth: int) -> None:
    """Tell each unit what to gather ahead; both sequences are in the order in which their pass runs."""

    def ahead(units: Sequence[nn.Module], i: int) -> list[FSDPModule]:
        following = [_fsdp_modules(unit, experts) for unit in units[i + 1 : i + 1 + depth]]
        return [module for modules in following for module in modules]

    for i, unit in enumerate(forward):
        cast(FSDPModule, unit).set_modules_to_forward_prefetch(ahead(forward, i))
    for i, unit in enumerate(backward):
        cast(FSDPModule, unit).set_modules_to_backward_prefetch(ahead(backward, i))


def _fsdp_modules(unit: nn.Module, experts: set[nn.Module]) -> list[FSDPModule]:
    """What is gathered for a unit, its experts last."""
    modules = [m for m in unit.modules() if isinstance(m, FSDPModule)]
    return sorted(modules, key=lambda m: m in experts)
