"""Read the sizes that the planner needs from a model that is built on the meta device."""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from ..fsdp.options import ShardingOptions
from ..fsdp.ulysses import heads_to_split
from ..fsdp.wrap_plan import GroupSizes, ParamGroup, Unit, frozen_with_lora, units_of
from ..model.meta import build_on_meta
from ..moe.find import UnsupportedModelError
from ..optim.muon_partition import muon_parameters
from ..topology.expert_placement import check_experts_divide
from ..topology.mesh import Topology
from .activations import Traced, trace

__all__ = ["ModelSizes", "group_sizes"]


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """The sizes of a model.

    Args:
        master: dtype of the parameters that the optimizer steps.
        whole: bytes of parameters that are not sharded.
        outputs: outputs of the head per token: logits, or one value for a critic.
        num_experts: number of experts of each experts module.
        matrices: names of the parameters that Muon steps.
        heads: the number of heads that the sequence-parallel size has to divide; 1 if it has to be 1.
        unshared: why the sequence-parallel size has to be 1; empty if it need not.
        untraced: why it is not known what autograd saves and what the layers send; empty if it is known.
    """

    name: str
    units: tuple[Unit, ...]
    traced: Traced
    master: torch.dtype
    whole: int
    outputs: int
    num_experts: tuple[int, ...]
    matrices: Collection[str]
    heads: int
    unshared: str = ""
    untraced: str = ""

    @classmethod
    def of(
        cls,
        auto_class: Any,
        config: PretrainedConfig,
        options: ShardingOptions,
        master: torch.dtype = torch.float32,
    ) -> "ModelSizes":
        """Build the model on the meta device, and read its sizes.

        Raises:
            UnsupportedModelError: it has no experts that can be dispatched, or can't be traced.
        """
        return cls.built_by(functools.partial(build_on_meta, auto_class, config), options, master).require_traced()

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
        units, whole = units_of(model, options)
        counts = tuple(
            next(iter(group.shapes[name][dim] for name, dim in group.ep_dims.items()))
            for unit in units
            for group in unit.groups
            if group.is_experts
        )
        matrices = frozenset(muon_parameters(model))
        heads, unshared = 1, ""
        try:
            heads = heads_to_split(model)
        except UnsupportedModelError as error:
            unshared = str(error)
        head = model.get_output_embeddings()
        outputs = 1 if head is None else head.weight.shape[0]
        if options.param_dtype != master:
            model = build(options.param_dtype)
        for name in frozen_with_lora(model):
            model.get_parameter(name).requires_grad_(False)
        traced, untraced = Traced({}, 0.0), ""
        try:
            traced = trace(model, options.expert_plan, recompute_activations=options.experts_backend != "reference")
        except UnsupportedModelError as error:
            untraced = str(error)
        return cls(
            name=type(model).__name__,
            units=tuple(units),
            traced=traced,
            master=master,
            whole=whole,
            outputs=outputs,
            num_experts=counts,
            matrices=matrices,
            heads=heads,
            unshared=unshared,
            untraced=untraced,
        )

    def require_traced(self) -> "ModelSizes":
        """Return this, if what autograd saves is known.

        Raises:
            UnsupportedModelError: it is not known.
        """
        if self.untraced:
            raise UnsupportedModelError(self.untraced)
        return self

    def check(self, topology: Topology) -> None:
        """Check that the mesh fits the model.

        Raises:
            SettingError: the mesh would split an expert.
        """
        check_experts_divide(self.num_experts, topology, self.name)


@functools.lru_cache(maxsize=1024)
def group_sizes(
    sizes: ModelSizes, topology: Topology, shard_dim: int | str = "auto"
) -> tuple[tuple[str, ParamGroup, GroupSizes], ...]:
    """Return each group with its unit's name and its sizes, in the order of the forward.

    Raises:
        SettingError: as in ``ParamGroup.sizes``.
    """
    pairs = [(unit.name, group) for unit in sizes.units for group in unit.groups]
    return tuple((unit, group, group.sizes(topology, shard_dim)) for unit, group in pairs)
