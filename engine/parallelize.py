"""Expert parallelism with FSDP2: how a Mixture-of-Experts model is sharded, in seven steps.

Two device meshes over the same ranks (``topology/mesh.py``), here for 16 ranks with ``ep_size=8`` and one replica:

    mesh      axes                            rank        0  1  2  3  4  5  6  7 |  8  9 10 11 12 13 14 15
    dense     (dp_replicate, fsdp)            fsdp        0  1  2  3  4  5  6  7 |  8  9 10 11 12 13 14 15
    experts   (dp_replicate, ep_fsdp, ep)     ep          0  1  2  3  4  5  6  7 |  0  1  2  3  4  5  6  7
                                              ep_fsdp     0  0  0  0  0  0  0  0 |  1  1  1  1  1  1  1  1

    dp_replicate * ep_fsdp * ep * etp == dp_replicate * fsdp == world        (etp, fastest, is 1 by default)

    parameter                       global shape      placements                              a rank computes with
    experts, gate_up_proj           [E, 2I, D]        ep: Shard(0), ep_fsdp: Shard(0 or 1)    [E / ep, 2I, D]
    experts, down_proj              [E, D, I]         ep: Shard(0), ep_fsdp: Shard(0 or 1)    [E / ep, D, I]
    attention, norms, router, ...   [n, ...]          fsdp: Shard(0)                          [n, ...]
    correction biases, if frozen    [E]               none: every rank holds them whole       [E]

    with etp_size > 1, gate_up_proj   and etp: _StridedShard(1, 2), ep_fsdp: Shard(0 or 2)    [E / ep, 2I / etp, D]
                       down_proj      and etp: Shard(2)                                       [E / ep, D, I / etp]

Tokens move over ``ep``: dispatch and combine are all-to-alls inside the experts' forward. Parameters move over
``ep_fsdp`` and ``fsdp``: FSDP2 all-gathers them before a module computes and reduce-scatters their gradients after it.
Over ``etp`` received rows are gathered and partial outputs reduce-scattered, ``out == sum over etp of act_j @ down_j``.

The gradient is that of the plain model under three invariants:

1. One divide factor. The loss is a mean over ``world`` ranks, so for every parameter

       grad == 1 / world * sum over all ranks of d(loss of the rank) / d(parameter)

   The backward all-to-all has already summed an expert's gradient over ``ep``, and the backward of the reduce-scatter
   over ``etp``. FSDP sums it over the other ``world / (ep * etp)`` ranks and would divide by their number, which makes
   experts' gradients ``ep * etp`` times too large. Hence every unit divides by ``world`` (step 6).

2. One order of collectives on all ranks:

       all-to-alls (and, inside them, etp's) of an experts module's backward  <  its reduce-scatter  <  the next unit's

   whatever the routing is: a rank without tokens sends zero rows (``tests/engine/test_order.py``). Experts are FSDP
   units of their own, with dispatch and combine inside their forward, so FSDP launches their reduce-scatter after
   autograd has left that forward. In their layer's unit, ranks could launch the two in different orders, and NCCL
   would hang.

3. Experts are DTensors of their full global shape:

       param.shape == (E, ...)      param.placements == (ep_fsdp: Shard(0 or 1), ep: Shard(0)), and etp's as above

   so checkpoints, clipping, export and weight syncs need no code for EP. Plain tensors of ``E / ep`` experts would have
   the same names and shapes but other contents on each rank.

A dense model has ``ep == 1`` and no experts: steps 2 and 3 do nothing, and the rest is plain FSDP2.
See also ``fsdp/wrap_plan.py`` (units), ``moe/forward.py`` (experts' forward), ``tests/engine/test_exactness.py``.
"""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from .compat.torch_sms import leave_sms
from .dense.fuse import fuse_dense
from .fsdp.activation_checkpoint import checkpoint_layers
from .fsdp.compile import compile_dense_parts
from .fsdp.fp32_modules import keep_input_dtype, run_under_autocast
from .fsdp.options import ShardingOptions
from .fsdp.single_rank import compute_with_shards, keep_gradients, reduce_in_place
from .fsdp.unit import Unit
from .fsdp.wrap_plan import wrap_plan
from .model.layers import decoder_layers, layer_names
from .moe.find import ExpertsInfo, check_etp, find_experts
from .moe.forward import install_experts_forward
from .moe.gemm.backends import choose_backend
from .packing.compressors import use_every_compressor
from .topology.expert_placement import check_experts_divide, model_parallel_placements
from .topology.mesh import Meshes

__all__ = ["parallelize"]


def parallelize(model: Any, meshes: Meshes, options: ShardingOptions) -> nn.Module:
    """Shard ``model``, which may be on the meta device, in place over ``meshes`` and return it, an ``FSDPModule``.

    Raises:
        UnsupportedModelError: the model has experts that can't be dispatched.
        SettingError: ``ep``, ``etp`` or ``ep_fsdp`` does not divide, the experts' backend can't run here, a pattern
            matches nothing, or no shared experts can overlap.
    """
    # 1. Find the experts modules, and plan the FSDP units, inner modules before outer ones.
    experts = find_experts(model, options.expert_plan)
    check_experts_divide([info.num_experts for info in experts], meshes.topology, type(model).__name__)
    check_etp(experts, meshes.topology, type(model).__name__)
    plan = wrap_plan(model, options)
    experts_modules = {info.module for info in experts}
    device_type = meshes.dense.device_type

    # 2. Shard the experts over ep and etp. FSDP then sees DTensors, and shards them once more over ep_fsdp.
    for info in experts:
        shard_experts(info, meshes)

    # 3. Give the experts a forward that dispatches their tokens, computes the local experts, and combines.
    install_experts_forward(
        model,
        experts,
        meshes.ep.get_group() if meshes.topology.ep > 1 else None,
        meshes.etp_group,
        choose_backend(options.experts_backend, device_type, options.param_dtype, options.batch_invariant).name,
        dispatcher=options.dispatcher,
        chunks=options.dispatch_chunks,
        overlap_shared_experts=options.overlap_shared_experts,
        batch_invariant=options.batch_invariant,
    )
    leave_sms(options.communication_sms, device_type == "cuda" and meshes.topology.world > 1)

    # 4. Wrap forwards, before FSDP's hooks: compressors, fused kernels, autocast, compilation, recomputation.
    use_every_compressor(model)
    if options.fuse_dense and device_type == "cuda" and not options.compile_dense:
        fuse_dense(model, device_type)
    run_under_autocast(model, experts_modules, device_type, options.param_dtype)
    if options.compile_dense:
        compile_dense_parts([model.get_submodule(fqn) for fqn in layer_names(model)], experts_modules)
    most_experts = max((info.num_experts for info in experts), default=0)
    last = decoder_layers(model)[-1:]
    recomputed = [model.get_submodule(fqn) for fqn in layer_names(model) if fqn not in last]
    checkpoint_layers(recomputed, experts_modules, most_experts, options.checkpointing, options.activation_offload)

    # 5. Wrap each unit of the plan.
    for unit in plan:
        wrap(model, unit, meshes, options)

    # 6. Set the one divide factor of every unit's gradient.
    for unit in plan:
        divide_gradient(_fsdp_module(model, unit.name), unit, meshes, options)

    # 7. Gather the next units while one computes, in forward and in backward.
    for unit in plan:
        module = _fsdp_module(model, unit.name)
        module.set_modules_to_forward_prefetch([_fsdp_module(model, name) for name in unit.forward_prefetch])
        module.set_modules_to_backward_prefetch([_fsdp_module(model, name) for name in unit.backward_prefetch])
    return model


def shard_experts(info: ExpertsInfo, meshes: Meshes) -> None:
    """Make parameters with an experts dim DTensors, sharded over ``ep`` along it and over ``etp`` along an inner dim.

    ``[E, ..., ...]`` keeps its shape; its local tensor is ``[E / ep, ..., ...]``.
    """
    axes, etp_dims = meshes.topology.model_parallel_axes, info.etp_dims
    for name, ep_dim in info.ep_dims.items():
        param = info.module.get_parameter(name)
        placements = model_parallel_placements(axes, ep_dim, etp_dims.get(name))
        # No source rank: each rank slices its own copy, which on the meta device has no values.
        sharded = distribute_tensor(param.detach(), meshes.model_parallel, placements, src_data_rank=None)
        info.module.register_parameter(name, nn.Parameter(sharded, requires_grad=param.requires_grad))


def wrap(model: nn.Module, unit: Unit, meshes: Meshes, options: ShardingOptions) -> None:
    """Make the modules of a unit one parameter group of FSDP2."""
    modules = [model.get_submodule(fqn) for fqn in unit.modules]
    topology, shard_dim = meshes.topology, options.expert_shard_dim
    dims = {model.get_parameter(name): unit.shard_dim(name, topology, shard_dim) for name in unit.shapes}
    if unit.casts_outputs:
        modules[0].register_forward_hook(keep_input_dtype)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if options.cpu_offload else OffloadPolicy()
    fully_shard(
        modules[0] if len(modules) == 1 else modules,
        mesh=meshes.experts_shard if unit.is_experts else meshes.dense_shard,
        reshard_after_forward=unit.reshard_after_forward,
        shard_placement_fn=(lambda param: Shard(dims[param])) if unit.is_experts else None,  # None: dim 0
        mp_policy=MixedPrecisionPolicy(unit.param_dtype, unit.reduce_dtype, cast_forward_inputs=unit.casts_inputs),
        offload_policy=offload,
        ignored_params={model.get_parameter(name) for name in unit.unsharded},
    )
    module = cast(FSDPModule, modules[0])
    if not unit.unshard_in_backward:
        module.set_unshard_in_backward(False)
    # Measured to gain on CPUs alone; a GPU uses it only for the user's ``keep_casts``.
    if unit.ranks(topology) == 1 and (options.keep_casts or meshes.dense.device_type == "cpu"):
        compute_with_shards(module)


def divide_gradient(module: FSDPModule, unit: Unit, meshes: Meshes, options: ShardingOptions) -> None:
    """Divide the unit's gradient as in invariant 1; FSDP's default is the number of ranks of the unit."""
    factor = unit.divide_factor(meshes.topology)
    if unit.ranks(meshes.topology) == 1:
        # Not set_gradient_divide_factor: torch 2.13 divides twice in a group of one rank with summed reductions.
        is_kept = unit.keeps_gradients(meshes.topology, options.cpu_offload, meshes.dense.device_type)
        (keep_gradients if is_kept else reduce_in_place)(module, factor)
        return
    module.set_gradient_divide_factor(factor)
    # Sum, then divide: FSDP's PREMUL_SUM exists in NCCL alone, whose float16 and bfloat16 kernels multiply by zero
    # (pytorch#190745).
    if not meshes.reduces_by_nccl or unit.reduce_dtype != torch.float32:
        module.set_force_sum_reduction_for_comms(True)


def _fsdp_module(model: nn.Module, fqn: str) -> FSDPModule:
    return cast(FSDPModule, model.get_submodule(fqn))
