"""What FSDP gathers and reduces together once ``parallelize`` has sharded a model: sizes, without ranks."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..model.layers import layer_names
from ..moe.find import find_experts
from ..topology.dtensor import is_adapter
from ..topology.expert_placement import ep_fsdp_dim
from ..topology.index_ranges import ShardStep
from ..topology.mesh import Topology
from .fp32_modules import correction_biases, find_islands
from .options import ShardingOptions

__all__ = [
    "EMBEDDINGS",
    "HEAD",
    "ROOT",
    "Ends",
    "GroupSizes",
    "ParamGroup",
    "Unit",
    "compute_dtypes",
    "cuts_before_sharding",
    "frozen_with_lora",
    "units_of",
]

ROOT, EMBEDDINGS, HEAD = "root", "embeddings", "head"


@dataclass(frozen=True)
class GroupSizes:
    """Elements of a group on a mesh.

    Args:
        ranks: that share the group; nothing is gathered where it is one.
        local: a rank's shard, padded as FSDP pads it.
        trained: of that shard, what has a gradient.
        moved: of what is cut along another dim than the first, which is copied once more to be put together.
        last: of the last parameter with a gradient, which FSDP holds while it reduces.
    """

    ranks: int
    local: int
    trained: int
    moved: int
    last: int

    @property
    def full(self) -> int:
        """What is gathered: a rank's part of the model (its experts alone, of experts)."""
        return self.ranks * self.local

    @property
    def reduced(self) -> int:
        """What is reduced: the gradients of it."""
        return self.ranks * self.trained


@dataclass(frozen=True)
class ParamGroup:
    """Parameters of one FSDP module.

    Args:
        shapes: global shape of each parameter, by name.
        ep_dims: the dim that counts the experts, of those that have one; empty for all but experts.
        compute: dtype in which they are gathered.
        freed: after the forward.
        gathered_again: in backward.
        frozen: names of parameters that have no gradient.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ep_dims: Mapping[str, int]
    compute: torch.dtype
    freed: bool
    gathered_again: bool
    frozen: frozenset[str] = frozenset()

    @property
    def is_experts(self) -> bool:
        return bool(self.ep_dims)

    def sizes(self, topology: Topology, shard_dim: int | str = "auto") -> GroupSizes:
        """
        Raises:
            SettingError: an explicit ``shard_dim`` does not divide.
        """
        ranks = topology.ep_fsdp if self.is_experts else topology.fsdp
        local = trained = moved = last = 0
        for name in self.shapes:
            size, dim = self._local(name, topology, shard_dim)
            local += size
            moved += size * ranks if dim != 0 and ranks > 1 else 0
            if name not in self.frozen:
                trained, last = trained + size, size
        return GroupSizes(ranks, local, trained, moved, last * ranks if ranks > 1 else 0)

    def local_of(self, name: str, topology: Topology, shard_dim: int | str = "auto") -> int:
        """Elements of a rank's padded shard of one parameter."""
        return self._local(name, topology, shard_dim)[0]

    def _local(self, name: str, topology: Topology, shard_dim: int | str) -> tuple[int, int]:
        shape = list(self.shapes[name])
        if not self.is_experts:
            return -(-shape[0] // topology.fsdp) * math.prod(shape[1:]), 0
        dim = ep_fsdp_dim(shape, topology, shard_dim, self.ep_dims[name])
        shape[self.ep_dims[name]] //= topology.ep
        shape[dim] = -(-shape[dim] // topology.ep_fsdp)
        return math.prod(shape), dim


@dataclass(frozen=True)
class Unit:
    """What computes at a time, and is gathered ahead of it: the root, the embeddings, a layer, or the head."""

    name: str
    groups: tuple[ParamGroup, ...]


def frozen_with_lora(model: nn.Module) -> frozenset[str]:
    """Names of all parameters but adapters, where there are adapters."""
    names = {name for name, _ in model.named_parameters()}
    adapters = {name for name in names if is_adapter(name)}
    return frozenset(names - adapters if adapters else ())


def units_of(model: Any, options: ShardingOptions) -> tuple[list[Unit], int]:
    """A model that is not sharded yet, on the meta device or elsewhere, as ``parallelize`` would wrap it.

    Returns:
        The units in the order of the forward, and the bytes that each rank holds whole (frozen correction biases).

    Raises:
        UnsupportedModelError, SettingError: as ``parallelize``.
    """
    experts = {info.fqn: info for info in find_experts(model, options.expert_plan)}
    names = {param: name for name, param in model.named_parameters()}
    whole = correction_biases(model, {info.num_experts for info in experts.values()})
    taken: set[nn.Parameter] = set(whole)
    found: dict[str, list[ParamGroup]] = {}
    layers = layer_names(model)
    frozen = frozen_with_lora(model)

    def unit_of(name: str) -> str:
        return next((layer for layer in layers if name.startswith(f"{layer}.")), ROOT)

    def add(
        unit: str | None,
        params: Iterable[nn.Parameter],
        freed: bool,
        compute: torch.dtype = options.param_dtype,
        ep_dims: Mapping[str, int] | None = None,
        again: bool | None = None,
    ) -> None:
        own = {names[p]: tuple(p.shape) for p in dict.fromkeys(params) if p not in taken}
        taken.update(params)
        if own:
            again = freed if again is None else again
            group = ParamGroup(own, ep_dims or {}, compute, freed, again, frozen.intersection(own))
            found.setdefault(unit or unit_of(next(iter(own))), []).append(group)

    reshard, reshard_experts = options.reshard_after_forward, options.reshard_experts_after_forward
    for fqn, info in experts.items():
        freed = reshard if reshard_experts is None else reshard_experts
        dims = {f"{fqn}.{name}": dim for name, dim in info.ep_dims.items()}
        add(None, [*info.module.parameters()], freed, ep_dims=dims)
    if {options.param_dtype, *(p.dtype for p in model.parameters())} != {torch.float32}:
        for island in find_islands(model, [info.module for info in experts.values()], options.fp32_modules):
            add(None, [p for module in island.mainland for p in module.parameters()], reshard)
            add(None, [*island.module.parameters()], reshard, torch.float32)
    for layer in layers:
        add(layer, [*model.get_submodule(layer).parameters()], reshard)
    ends = Ends.of(model, options.head_in_root)
    if ends.embeddings is not None:
        again = reshard and not isinstance(ends.embeddings, nn.Embedding)
        add(EMBEDDINGS, [*ends.embeddings.parameters()], reshard, again=again)
    if ends.head is not None:
        add(HEAD, [*ends.head.parameters()], False)
    add(ROOT, [*model.parameters()], False)
    order = [ROOT, EMBEDDINGS, *layers, HEAD]
    units = [Unit(name, tuple(found[name])) for name in order if name in found]
    return units, sum(p.numel() * p.element_size() for p in whole)


def compute_dtypes(model: nn.Module, options: ShardingOptions) -> dict[str, torch.dtype]:
    """The dtype in which the forward of a model sharded with ``options`` reads each parameter, by name."""
    experts = find_experts(model, options.expert_plan)
    as_stored = correction_biases(model, {e.num_experts for e in experts})
    in_float32: set[nn.Parameter] = set()
    for island in find_islands(model, [e.module for e in experts], options.fp32_modules):
        mainland = {p for module in island.mainland for p in module.parameters()}
        in_float32 |= set(island.module.parameters()) - mainland

    def of(param: nn.Parameter) -> torch.dtype:
        return param.dtype if param in as_stored else torch.float32 if param in in_float32 else options.param_dtype

    return {name: of(param) for name, param in model.named_parameters()}


@dataclass(frozen=True)
class Ends:
    """The input embeddings and the head, where FSDP can wrap them: none of their parameters is used elsewhere too."""

    embeddings: nn.Module | None
    head: nn.Module | None

    @classmethod
    def of(cls, model: Any, head_in_root: bool) -> "Ends":
        users = Counter(p for module in model.modules() for p in module.parameters(recurse=False))

        def own(module: nn.Module | None) -> nn.Module | None:
            return module if module is not None and all(users[p] == 1 for p in module.parameters()) else None

        return cls(own(model.get_input_embeddings()), None if head_in_root else own(model.get_output_embeddings()))


def cuts_before_sharding(
    model: nn.Module,
    topology: Topology,
    expert_shard_dim: int | str = "auto",
    expert_plan: Mapping[str, int] | None = None,
) -> dict[str, tuple[ShardStep, ...]]:
    """How ``parallelize`` would cut each parameter of a model that is not sharded, outermost cut first.

    Raises:
        UnsupportedModelError, SettingError: as ``parallelize``.
    """
    experts = find_experts(model, expert_plan)
    whole = correction_biases(model, {e.num_experts for e in experts})
    cuts: dict[str, tuple[ShardStep, ...]] = {
        name: () if param in whole else (ShardStep(0, "fsdp", topology.fsdp),)
        for name, param in model.named_parameters()
    }
    for info in experts:
        for name, param in info.module.named_parameters(recurse=False):
            ep_dim = info.ep_dims.get(name, 0)
            over_ep = (ShardStep(ep_dim, "ep", topology.ep),) if name in info.ep_dims else ()
            dim = ep_fsdp_dim(param.shape, topology, expert_shard_dim, ep_dim)
            cuts[f"{info.fqn}.{name}"] = (*over_ep, ShardStep(dim, "ep_fsdp", topology.ep_fsdp))
    return cuts
