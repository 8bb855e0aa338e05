"""The wrap plan: which modules FSDP2 wraps, in which order, and how, as data.

    experts  ->  modules kept in float32  ->  layers  ->  embeddings, head  ->  model

``parallelize`` executes the plan; the planner of memory and traffic and the weight sync read it. It depends on the
model alone, on any device, sharded or not, and needs no process groups. Methods of ``Unit`` that depend on the number
of ranks get a ``Topology``, so one plan serves every mesh.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..model.layers import is_mtp, layer_names, mtp_heads
from ..model.vision import tower_parameters
from ..moe.find import ExpertsInfo, find_experts
from ..topology.dtensor import is_adapter
from .fp32_modules import correction_biases, find_float32_modules
from .options import ShardingOptions
from .unit import EMBEDDINGS, HEAD, ROOT, Kind, Unit

__all__ = ["compute_dtypes", "frozen_parameters", "wrap_plan"]


def wrap_plan(model: Any, options: ShardingOptions) -> list[Unit]:
    """Plan the FSDP units of a model, in the order of wrapping: inner modules before outer ones.

    Every parameter is in one unit, the first that holds it, or in that unit's ``unsharded``.

    Raises:
        UnsupportedModelError: the model has experts that can't be dispatched.
        SettingError: a pattern of ``options.fp32_modules`` or ``options.expert_plan`` matches nothing, or what it must
            not.
    """
    experts = find_experts(model, options.expert_plan)
    embeddings, head = _embeddings_and_head(model, options.head_in_root)
    units = _Units(model, options, experts, {EMBEDDINGS: embeddings, HEAD: head})
    reshard, of_experts = options.reshard_after_forward, options.reshard_experts_after_forward
    for info in experts:
        units.add(
            "experts",
            [info.module],
            reshard if of_experts is None else of_experts,
            ep_dims={f"{info.fqn}.{name}": dim for name, dim in info.ep_dims.items()},
            etp_dims={f"{info.fqn}.{name}": cut for name, cut in info.etp_dims.items()},
            casts_inputs=False,  # routing weights may be float32 on purpose; the experts cast hidden states themselves
        )
    if {options.param_dtype, *(p.dtype for p in model.parameters())} != {torch.float32}:
        for found in find_float32_modules(model, [info.module for info in experts], options.fp32_modules):
            units.add("low_precision", found.low_precision_children, reshard)
            units.add(
                "float32",
                [found.module],
                reshard,
                param_dtype=torch.float32,
                casts_inputs=found.casts_inputs,
                casts_outputs=not found.casts_inputs,
            )
    for own_head in mtp_heads(model):
        units.add("head", [model.get_submodule(own_head)], False, casts_inputs=False)
    for layer in units.layers:
        units.add("layer", [model.get_submodule(layer)], reshard)
    if embeddings is not None:
        # The gradient of a table reads no weight; Inkling's embeddings end with a norm, whose gradient does.
        is_table = isinstance(embeddings, nn.Embedding) and [n for n, _ in embeddings.named_parameters()] == ["weight"]
        units.add("embeddings", [embeddings], reshard, unshard_in_backward=not is_table)
    if head is not None:
        units.add("head", [head], False)  # its backward follows its forward at once
    # FSDP keeps the root's parameters between forward and backward, as fused linear cross-entropy kernels need, which
    # save lm_head.weight for backward.
    units.add("root", [model], None)
    return units.with_prefetch()


def _embeddings_and_head(model: Any, head_in_root: bool) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the embeddings and the head that are units of their own; None if tied: a parameter is in one unit."""
    users = Counter(p for module in model.modules() for p in module.parameters(recurse=False))

    def own(module: nn.Module | None) -> nn.Module | None:
        return module if module is not None and all(users[p] == 1 for p in module.parameters()) else None

    return own(model.get_input_embeddings()), None if head_in_root else own(model.get_output_embeddings())


class _Units:
    """Builds the plan: assigns each parameter to the first unit that holds it, and each unit to its stage.

    ``ends`` are the modules of the stages embeddings and head, if these are units.
    """

    def __init__(
        self, model: Any, options: ShardingOptions, experts: Sequence[ExpertsInfo], ends: Mapping[str, nn.Module | None]
    ) -> None:
        self.model, self.options, self.layers = model, options, layer_names(model)
        self._experts = {info.module for info in experts}
        self._fqns = {module: fqn for fqn, module in model.named_modules()}
        self._order = {fqn: i for i, fqn in enumerate(self._fqns.values())}
        self._whole = correction_biases(model, {info.num_experts for info in experts})
        self._frozen = frozen_parameters(model, options)
        self._without_backward = tower_parameters(model) if options.freeze_vision_tower else set()
        self._left = {param: name for name, param in model.named_parameters()}
        self._units: list[Unit] = []
        self._wrapped: set[nn.Module] = set()
        self._stages = {layer: layer for layer in self.layers}  # the FQN of each stage's module
        self._stages |= {stage: self._fqns[module] for stage, module in ends.items() if module is not None}

    def add(self, kind: Kind, modules: Iterable[nn.Module], reshard_after_forward: bool | None, **how: Any) -> None:
        """Add modules as one unit, except those that an earlier unit wraps (a layer or head kept in float32)."""
        new = [module for module in modules if module not in self._wrapped]
        if not new:
            return
        self._wrapped.update(new)
        params = [p for module in new for p in module.parameters() if p in self._left]
        names = {param: self._left.pop(param) for param in dict.fromkeys(params)}
        shapes = {name: tuple(param.shape) for param, name in names.items() if param not in self._whole}
        if shapes and self._without_backward.issuperset(shapes):
            how["unshard_in_backward"] = False
        how.setdefault("param_dtype", self.options.param_dtype)
        fqns = tuple(self._fqns[module] for module in new)
        stages = (name for name, module in self._stages.items() if f"{fqns[0]}.".startswith(f"{module}."))
        unit = Unit(
            kind=kind,
            modules=fqns,
            stage=next(stages, ROOT),
            shapes=shapes,
            reduce_dtype=self.options.reduce_dtype,
            reshard_after_forward=reshard_after_forward,
            unsharded=tuple(name for param, name in names.items() if param in self._whole),
            frozen=self._frozen.intersection(shapes),
            **how,
        )
        self._units.append(unit)

    def with_prefetch(self) -> list[Unit]:
        """Return the units, with prefetched units in the first unit of each stage.

        Stages run root, embeddings, layers, head in forward, and root, head, layers in backward. The layers of a vision
        tower prefetch only each other: a batch without images skips them, and a prefetched unit must be used. For the
        same reason no unit prefetches a multi-token prediction layer, which runs in training alone.
        """
        if not self.options.prefetch_depth:
            return self._units
        chains: dict[str, list[str]] = {}
        for layer in (layer for layer in self.layers if not is_mtp(self.model, layer)):
            chains.setdefault(layer.rpartition(".")[0], []).append(layer)
        main = self._layers_of_every_batch(list(chains.values()))
        forward: dict[str, tuple[str, ...]] = {}
        backward: dict[str, tuple[str, ...]] = {}
        for chain in chains.values():
            if chain is not main:
                forward |= self._ahead(chain)
                backward |= self._ahead(chain[::-1])
        first, last = ([stage] if stage in self._stages else [] for stage in (EMBEDDINGS, HEAD))
        forward |= self._ahead([ROOT, *first, *main, *last])
        backward |= self._ahead([ROOT, *last, *main[::-1]])
        return [
            replace(unit, forward_prefetch=forward.get(unit.name, ()), backward_prefetch=backward.get(unit.name, ()))
            for unit in self._units
        ]

    def _layers_of_every_batch(self, chains: Sequence[list[str]]) -> list[str]:
        """Return the layers that every batch runs: with experts, or of a dense model's language model."""
        if not self._experts and len(chains) > 1:
            decoder = {self._fqns[module] for module in self.model.get_decoder().modules()}
            return next((chain for chain in chains if decoder.issuperset(chain)), [])
        hold = {unit.stage for unit in self._units if unit.is_experts}
        return next((chain for chain in chains if not self._experts or hold.intersection(chain)), [])

    def _ahead(self, stages: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the units to gather when each stage of a pass starts, by the unit that wraps the stage's module."""
        starts = {fqn: unit.name for unit in self._units for fqn in unit.modules}
        found = {}
        for i, stage in enumerate(stages):
            following = stages[i + 1 : i + 1 + self.options.prefetch_depth]
            names = tuple(name for later in following for name in self._gathered_for(later))
            found[starts[self._stages.get(stage, "")]] = names
        return found

    def _gathered_for(self, stage: str) -> list[str]:
        """Return the names of a stage's units, dense ones before experts: attention needs its parameters first."""
        units = [unit for unit in self._units if unit.stage == stage]
        units.sort(key=lambda unit: (unit.is_experts, min(self._order[fqn] for fqn in unit.modules)))
        return [unit.name for unit in units]


def frozen_parameters(model: nn.Module, options: ShardingOptions) -> frozenset[str]:
    """Return the parameters that are not trained: a frozen tower's, and if there are adapters, all others."""
    names = {name for name, _ in model.named_parameters()}
    adapters = {name for name in names if is_adapter(name)}
    frozen = names - adapters if adapters else set()
    return frozenset(frozen | tower_parameters(model) if options.freeze_vision_tower else frozen)


def compute_dtypes(model: nn.Module, options: ShardingOptions) -> dict[str, torch.dtype]:
    """Return the dtype in which the forward of the sharded model reads each parameter, by name."""
    gathered = {name: unit.param_dtype for unit in wrap_plan(model, options) for name in unit.shapes}
    return {name: gathered.get(name, param.dtype) for name, param in model.named_parameters()}
