"""One FSDP unit (one call of ``fully_shard``) as data, and its sizes on a mesh.

A unit names modules and parameters and holds none, so it can be compared, printed, and kept without the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..topology.expert_placement import EtpDim, ep_fsdp_dim
from ..topology.index_ranges import ShardStep
from ..topology.mesh import Topology

__all__ = ["EMBEDDINGS", "HEAD", "ROOT", "Kind", "Stage", "Unit", "UnitSizes", "stages_of"]

ROOT, EMBEDDINGS, HEAD = "root", "embeddings", "head"
Kind = Literal["experts", "low_precision", "float32", "layer", "embeddings", "head", "root"]


@dataclass(frozen=True)
class UnitSizes:
    """Elements of a unit that ``ranks`` share.

    Args:
        local: of a rank's shard, padded as FSDP pads it.
        trained: of the parameters in that shard that have a gradient.
        moved: of parameters that are not sharded along dim 0, which FSDP copies again after the all-gather.
        last: of the last parameter with a gradient, which FSDP holds while it reduces.
    """

    ranks: int
    local: int
    trained: int
    moved: int
    last: int

    @property
    def full(self) -> int:
        """Elements of the all-gather's output: the unit's parameters, or one EP rank's part of experts."""
        return self.ranks * self.local

    @property
    def reduced(self) -> int:
        """Elements of the reduce-scatter's input: their gradients."""
        return self.ranks * self.trained


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP2 gathers, frees and reduces together.

    Args:
        kind: ``low_precision`` are children of a module that is kept in float32, gathered in the lower precision.
        modules: FQNs; the root's is ``""``.
        stage: the root, the embeddings, the head, or the layer that it is a part of.
        shapes: global shape of each parameter, by FQN. A parameter belongs to the first unit that holds it.
        param_dtype, reduce_dtype: of the gathered parameters, and of the gradient reduction.
        reshard_after_forward: free gathered parameters after forward; None is FSDP's default for the root: keep them.
        ep_dims, etp_dims: for each parameter of experts, the dim that counts the experts, and that ``etp`` shards.
        casts_inputs: FSDP casts floating-point inputs of the forward to ``param_dtype``.
        casts_outputs: cast the forward's output to the dtype of its input.
        unshard_in_backward: backward reads the parameters.
        unsharded: parameters in FSDP's ``ignored_params``: each rank holds them whole, in their own dtype.
        frozen: parameters without a gradient, beside adapters or in a frozen vision tower.
        forward_prefetch, backward_prefetch: names of the units whose all-gathers start with this unit's pass.
    """

    kind: Kind
    modules: tuple[str, ...]
    stage: str
    shapes: Mapping[str, tuple[int, ...]]
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool | None
    ep_dims: Mapping[str, int] = field(default_factory=dict)
    etp_dims: Mapping[str, EtpDim] = field(default_factory=dict)
    casts_inputs: bool = True
    casts_outputs: bool = False
    unshard_in_backward: bool = True
    unsharded: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """FQN of the first module; no two units of a plan share it."""
        return self.modules[0]

    @property
    def is_experts(self) -> bool:
        """Whether the unit is sharded on the experts' mesh, over ``ep_fsdp``, instead of the dense mesh."""
        return self.kind == "experts"

    @property
    def is_freed(self) -> bool:
        """Whether gathered parameters are freed between forward and backward."""
        return bool(self.reshard_after_forward)

    @property
    def is_gathered_again(self) -> bool:
        """Whether backward gathers the parameters again."""
        return self.is_freed and self.unshard_in_backward

    def ranks(self, topology: Topology) -> int:
        """Return the number of ranks that the unit is sharded over."""
        return topology.ep_fsdp if self.is_experts else topology.fsdp

    def divide_factor(self, topology: Topology) -> float:
        """Return the divisor of the gradient after the sum over the unit's ranks.

        It is the number of ranks in the loss's mean. For a unit of one rank FSDP computes the mean over replicas, which
        leaves the rest of the factor.
        """
        return topology.world / (topology.dp_replicate if self.ranks(topology) == 1 else 1)

    def keeps_gradients(self, topology: Topology, cpu_offload: bool, device_type: str) -> bool:
        """Return whether gradients are neither packed, reduced nor moved to the host; on CPUs, where it gains."""
        return self.ranks(topology) == topology.dp_replicate == 1 and not cpu_offload and device_type == "cpu"

    def shard_dim(self, name: str, topology: Topology, expert_shard_dim: int | str = "auto") -> int:
        """Return the dim of a parameter that FSDP shards over the unit's ranks; for experts see ``expert_shard_dim``.

        Raises:
            SettingError: an explicit dim does not divide.
        """
        if not self.is_experts:
            return 0
        ep_dim, etp_dim = self.ep_dims.get(name, 0), self.etp_dims.get(name)
        return ep_fsdp_dim(self.shapes[name], topology, expert_shard_dim, ep_dim, etp_dim)

    def cuts(self, name: str, topology: Topology, expert_shard_dim: int | str = "auto") -> tuple[ShardStep, ...]:
        """Return a parameter's shard steps over its mesh's axes, the outermost first; arguments as in ``shard_dim``."""
        dim = self.shard_dim(name, topology, expert_shard_dim)
        if not self.is_experts:
            return (ShardStep(dim, "fsdp", topology.fsdp),)
        steps = [ShardStep(self.ep_dims[name], "ep", topology.ep)] if name in self.ep_dims else []
        if topology.etp > 1 and name in self.etp_dims:
            cut = self.etp_dims[name]
            steps.append(ShardStep(cut.dim, "etp", topology.etp, cut.parts))
        return (*steps, ShardStep(dim, "ep_fsdp", topology.ep_fsdp))

    def local_numel(self, name: str, topology: Topology, expert_shard_dim: int | str = "auto") -> int:
        """Return the elements of a rank's padded shard of one parameter; arguments as in ``shard_dim``."""
        shape = list(self.shapes[name])
        for step in self.cuts(name, topology, expert_shard_dim):
            shape[step.dim] = -(-shape[step.dim] // step.parts)
        return math.prod(shape)

    def sizes(self, topology: Topology, expert_shard_dim: int | str = "auto") -> UnitSizes:
        """Return the unit's sizes; arguments and errors as in ``shard_dim``."""
        ranks = self.ranks(topology)
        local = trained = moved = last = 0
        for name in self.shapes:
            size = self.local_numel(name, topology, expert_shard_dim)
            local += size
            moved += size * ranks if ranks > 1 and self.shard_dim(name, topology, expert_shard_dim) != 0 else 0
            if name not in self.frozen:
                trained, last = trained + size, size
        return UnitSizes(ranks, local, trained, moved, last * ranks if ranks > 1 else 0)


@dataclass(frozen=True)
class Stage:
    """Units that are prefetched together: the root, the embeddings, a layer, or the head."""

    name: str
    units: tuple[Unit, ...]


def stages_of(plan: Sequence[Unit], layers: Sequence[str]) -> list[Stage]:
    """Return the units that hold parameters, in the order of the forward; ``layers`` are FQNs in their order."""
    names = ROOT, EMBEDDINGS, *layers, HEAD
    found = [Stage(name, tuple(unit for unit in plan if unit.stage == name and unit.shapes)) for name in names]
    return [stage for stage in found if stage.units]
