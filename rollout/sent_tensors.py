"""The tensors of a sync, and who gets which parts; of quantised weights values, and the scales of each beside it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..engine.quantise.schemes import scheme_of
from ..engine.topology.index_ranges import IndexRange
from ..engine.topology.mesh import Topology
from .layout.specs import Heads, Rollout, TargetSlice, TensorSpec
from .plan.routes import Member
from .plan.transfer_plan import Targets, TransferPlan, make_transfer_plan
from .servers import is_quantised, planned_layouts, slices_of_scales, target_slices
from .transport.exchange import Exchange

__all__ = ["SCALES", "SentModel", "dtype_in", "slices_of_workers", "with_scales"]

SCALES = "::scales"
"""What follows a weight's name in that of the tensor of its scales, float32, of which every trainer rank has all."""


def with_scales(tensors: Iterable[TensorSpec], rollout: Rollout, family: str) -> list[TensorSpec]:
    """Return the tensors as they are sent to such a rollout: weights that it holds quantised with their scales."""
    if not rollout.is_quantised:
        return list(tensors)
    scheme, found = scheme_of(rollout.block, rollout.channels), []
    for tensor in tensors:
        if not is_quantised(family, tensor.name):
            found.append(tensor)
            continue
        found.append(TensorSpec(tensor.name, tensor.shape, scheme.dtype.itemsize, tensor.cuts))
        found.append(TensorSpec(tensor.name + SCALES, scheme.sharing(IndexRange.of(tensor.shape)).shape, 4))
    return found


def dtype_in(dtypes: Mapping[str, torch.dtype], rollout: Rollout, family: str) -> Callable[[str], torch.dtype]:
    """Return a function from a tensor's name, scales included, to the dtype in which it is sent to such a rollout.

    Args:
        dtypes: in which tensors are sent that are not quantised.
    """
    if not rollout.is_quantised:
        return dtypes.__getitem__
    values = scheme_of(rollout.block, rollout.channels).dtype

    def of(name: str) -> torch.dtype:
        if name.endswith(SCALES):
            return torch.float32
        return values if is_quantised(family, name) else dtypes[name]

    return of


def slices_of_workers(
    tensors: Iterable[TensorSpec], rollout: Rollout, heads: Heads
) -> Callable[[TensorSpec, int], list[TargetSlice]]:
    """Return a function from a tensor, scales included, and the index of a worker to the slices that it keeps."""
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
    """An engine's tensors, sharding and dtypes, from which all ranks of a sync make the same plan.

    Args:
        family: ``model_type`` of the model.
        tensors: in the model's order, as they are stored.
        dtypes: by name, in which they are sent to a rollout that is not quantised.
        layers: FQNs of the layers.
    """

    family: str
    tensors: tuple[TensorSpec, ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    layers: tuple[str, ...]
    topology: Topology
    heads: Heads

    def exchange(
        self,
        rollout: Rollout,
        targets: Targets,
        limit: int,
        member_of: Callable[[TransferPlan], Member],
        device: torch.device | str,
        group: dist.ProcessGroup | None,
        finish: Callable[[dist.Work], object] = dist.Work.wait,
        is_gather: bool = False,
    ) -> Exchange:
        """Return a rank's part of the exchange that brings the workers their parameters; this call is not collective.

        Args:
            limit: bytes of a round.
            member_of: returns this rank's part in the plan.
            group, finish, is_gather: see ``Exchange`` and ``make_transfer_plan``.

        Raises:
            RoundTooSmallError: what can't be divided exceeds the limit.
        """
        tensors = with_scales(self.tensors, rollout, self.family)
        slices_of = slices_of_workers(tensors, rollout, self.heads)
        plan = make_transfer_plan(tensors, self.layers, self.topology, targets, slices_of, limit, is_gather=is_gather)
        member, dtypes = member_of(plan), dtype_in(dict(self.dtypes), rollout, self.family)

        def own_slices(tensor: TensorSpec) -> list[TargetSlice]:
            return [] if member.kind is None else slices_of(tensor, member.kind)

        return Exchange(plan, member, own_slices, dtypes, device, group, self.heads.dim, finish)

    def planned_layouts(self, rollout: Rollout) -> list[dict[str, str]]:
        """Return the layout that is planned for each worker of a replica (``layout/layout_check.py``)."""
        return planned_layouts(self.tensors, rollout, self.heads)
