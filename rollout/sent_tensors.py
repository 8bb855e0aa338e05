"""The tensors of a sync and their slices for each worker; a quantised weight has values and a tensor of scales."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from ..engine.lora.merge import weights
from ..engine.model.layers import is_mtp
from ..engine.quantise.schemes import scheme_of
from ..engine.topology.dtensor import persistent_buffers, shard_steps
from ..engine.topology.index_ranges import IndexRange, ShardStep
from ..engine.topology.mesh import Topology
from .layout.specs import Heads, Rollout, TargetSlice, TensorSpec
from .plan.transfer_plan import Targets, make_transfer_plan
from .servers import is_quantised, planned_layout, slices_of_scales, target_slices
from .transport.exchange import Exchange

__all__ = ["SCALES", "SentModel", "slices_of_workers", "tensor_specs", "with_scales"]

SCALES = "::scales"  # suffix of the tensor of a weight's scales, float32, whole on every trainer rank


def tensor_specs(
    model: nn.Module,
    itemsize: Mapping[str, int] | int | None = None,
    cuts: Mapping[str, tuple[ShardStep, ...]] | None = None,
    drafts: bool = False,
) -> list[TensorSpec]:
    """Describe weights and persistent buffers, in the model's order.

    Args:
        itemsize: bytes per sent element, for all parameters or by name; defaults to the parameter's own.
        cuts: by name, for a model that is not sharded yet.
        drafts: include multi-token prediction layers.
    """
    found = []
    for name, param in weights(model):
        size = itemsize.get(name) if isinstance(itemsize, Mapping) else itemsize
        steps = shard_steps(param) if cuts is None else cuts[name]
        found.append(TensorSpec(name, tuple(param.shape), size or param.element_size(), steps))
    buffers = persistent_buffers(model).items()
    found += [TensorSpec(name, tuple(buffer.shape), buffer.element_size()) for name, buffer in buffers]
    return [tensor for tensor in found if drafts or not is_mtp(model, tensor.name)]


def with_scales(tensors: Iterable[TensorSpec], rollout: Rollout, family: str) -> list[TensorSpec]:
    """Return the tensors that are sent to a rollout: quantised weights are followed by their scales."""
    scheme, found = scheme_of(rollout.block, rollout.channels), []
    for tensor in tensors:
        if rollout.is_quantised and is_quantised(family, tensor.name):
            found.append(replace(tensor, itemsize=scheme.dtype.itemsize))
            found.append(TensorSpec(tensor.name + SCALES, scheme.sharing(IndexRange.of(tensor.shape)).shape, 4))
        else:
            found.append(tensor)
    return found


def slices_of_workers(
    tensors: Iterable[TensorSpec], rollout: Rollout, heads: Heads
) -> Callable[[TensorSpec, int], list[TargetSlice]]:
    """Return a function from a tensor (scales included) and a worker's index to the worker's slices."""
    by_name = {tensor.name: tensor for tensor in tensors}

    def of(tensor: TensorSpec, worker: int) -> list[TargetSlice]:
        weight = by_name[tensor.name.removesuffix(SCALES)]
        slices = target_slices(weight, rollout, worker, heads)
        if tensor.name.endswith(SCALES):
            return slices_of_scales(weight, slices, rollout, heads.family)
        return slices

    return of


@dataclass(frozen=True)
class SentModel:
    """An engine's tensors, sharding and dtypes, from which all ranks of a sync make the same plan."""

    tensors: tuple[TensorSpec, ...]  # in the model's order
    dtypes: tuple[tuple[str, torch.dtype], ...]  # by name, as sent to a rollout without quantisation
    layers: tuple[str, ...]  # FQNs
    topology: Topology
    heads: Heads

    def exchange(
        self,
        rollout: Rollout,
        targets: Targets,
        limit: int,
        rank: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None,
        finish: Callable[[dist.Work], object] = dist.Work.wait,
    ) -> Exchange:
        """Return a rank's part of the exchange that sends workers their parameters; not collective.

        ``limit`` and errors are those of ``make_transfer_plan``, other arguments those of ``Exchange``.
        """
        tensors = with_scales(self.tensors, rollout, self.heads.family)
        slices_of = slices_of_workers(tensors, rollout, self.heads)
        plan = make_transfer_plan(tensors, self.layers, self.topology, targets, slices_of, limit)
        quantised = [t.name.removesuffix(SCALES) for t in tensors if t.name.endswith(SCALES)]
        dtypes = dict(self.dtypes) | dict.fromkeys((name + SCALES for name in quantised), torch.float32)
        dtypes |= dict.fromkeys(quantised, scheme_of(rollout.block, rollout.channels).dtype)
        return Exchange(plan, rank, slices_of, dtypes.__getitem__, device, group, self.heads.dim, finish)

    def planned_layouts(self, rollout: Rollout) -> list[dict[str, str]]:
        """Return the planned layout of each worker of a replica (``layout/layout_check.py``)."""
        return [planned_layout(self.tensors, rollout, worker, self.heads) for worker in range(rollout.workers)]
