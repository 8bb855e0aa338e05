"""Read the sizes that the planner needs from a model that is built on the meta device."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..fsdp.options import ShardingOptions
from ..fsdp.ulysses import heads_to_split
from ..fsdp.unit import Stage, Unit, UnitSizes, stages_of
from ..fsdp.wrap_plan import frozen_parameters, wrap_plan
from ..head.causal_head import why_whole_logits
from ..model.layers import layer_names
from ..moe.find import UnsupportedModelError
from ..moe.gemm.backends import has_backend
from ..optim.muon_partition import Layout, muon_parameters
from ..packing.sequences import find_mixers
from ..topology.mesh import Topology
from .activations import Traced, trace

__all__ = ["ModelSizes", "unit_sizes"]


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """The sizes of a model."""

    name: str
    stages: tuple[Stage, ...]
    traced: Traced
    master: torch.dtype  # of the parameters that the optimizer steps
    whole: int  # bytes of parameters that are not sharded
    outputs: int  # of the head per token: logits, or one value for a critic
    head_width: int  # of the hidden states that the head reads
    chunked_logits: bool  # whether the head returns log-probs, and logits are never whole
    num_experts: tuple[int, ...]  # of each experts module
    etp_sizes: tuple[int, ...]  # sizes that the expert tensor-parallel size has to divide; 1 if experts can't be cut
    matrices: Mapping[str, Layout]  # the parameters that Muon steps, by name
    heads: int  # the number that the sequence-parallel size has to divide; 1 if that has to be 1,
    unshared: str = ""  # and the reason
    uncounted: str = ""  # memory and traffic of sequence parallelism that is not counted
    untraced: str = ""  # why saved tensors and sent rows are not known; empty if they are

    @classmethod
    def built_by(
        cls, build: Callable[[torch.dtype], Any], options: ShardingOptions, master: torch.dtype = torch.float32
    ) -> "ModelSizes":
        """Read the sizes of a model before it is sharded, with its adapters.

        Args:
            build: makes the model on the meta device, with parameters of a dtype; its config is changed.

        Raises:
            UnsupportedModelError: it has no experts that can be dispatched.
        """
        model = build(master)
        model.tie_weights()  # moving to meta may have undone it
        plan = wrap_plan(model, options)
        whole = sum(model.get_parameter(name).nbytes for unit in plan for name in unit.unsharded)
        stages = stages_of(plan, layer_names(model))
        experts = [unit for stage in stages for unit in stage.units if unit.is_experts]
        matrices = muon_parameters(model)
        heads, unshared = 1, ""
        try:
            heads = heads_to_split(model)
        except UnsupportedModelError as error:
            unshared = str(error)
        kinds = " and ".join(sorted({type(module).__name__ for module in find_mixers(model).others.values()}))
        head = model.get_output_embeddings()
        outputs, width = (1, 0) if head is None else head.weight.shape
        chunked_logits = options.chunked_logits and outputs > 1 and not why_whole_logits(model)
        for name in frozen_parameters(model, options):
            model.get_parameter(name).requires_grad_(False)
        traced, untraced = Traced({}, 0.0), ""
        try:
            model = model.to(options.param_dtype)  # the dtype in which FSDP gathers it
            fused = options.fuse_dense and not options.compile_dense
            traced = trace(model, options.expert_plan, has_backend(options.experts_backend), fused)
        except UnsupportedModelError as error:
            untraced = str(error)
        return cls(
            name=type(model).__name__,
            stages=tuple(stages),
            traced=traced,
            master=master,
            whole=whole,
            outputs=outputs,
            head_width=width,
            chunked_logits=chunked_logits,
            num_experts=tuple(next(unit.shapes[name][dim] for name, dim in unit.ep_dims.items()) for unit in experts),
            etp_sizes=tuple(sorted({size for unit in experts for size in _etp_sizes(unit)})),
            matrices=matrices,
            heads=heads,
            unshared=unshared,
            uncounted=f"what {kinds} sends, and holds of a long sequence" if kinds else "",
            untraced=untraced,
        )


def _etp_sizes(unit: Unit) -> list[int]:
    if unit.ep_dims.keys() - unit.etp_dims.keys():
        return [1]
    return [unit.shapes[name][cut.dim] // cut.parts for name, cut in unit.etp_dims.items()]


@functools.lru_cache(maxsize=1024)
def unit_sizes(
    sizes: ModelSizes, topology: Topology, shard_dim: int | str = "auto"
) -> tuple[tuple[str, Unit, UnitSizes], ...]:
    """Return each unit with its stage's name and its sizes, in the order of the forward (raises as ``Unit.sizes``)."""
    pairs = [(stage.name, unit) for stage in sizes.stages for unit in stage.units]
    return tuple((stage, unit, unit.sizes(topology, shard_dim)) for stage, unit in pairs)
