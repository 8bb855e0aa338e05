"""Count the collectives of FSDP and of the experts' dispatch on this rank."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

__all__ = ["Counted", "counted_collectives"]


@dataclass
class Counted:
    """All calls of a kind; ``nbytes`` and ``wire`` as in ``Collective`` of ``engine/planner/traffic.py``."""

    calls: int = 0
    nbytes: int = 0
    wire: float = 0.0


@contextlib.contextmanager
def counted_collectives(etp_group: dist.ProcessGroup | None = None) -> Iterator[dict[str, Counted]]:
    """Count collectives by the names of ``engine/planner/traffic.py``; groups of one rank move nothing.

    Args:
        etp_group: its exchanges omit a rank's own rows, which are counted nevertheless.
    """
    counted: dict[str, Counted] = {}

    def count(name, tensor, group):
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return
        entry, nbytes = counted.setdefault(name, Counted()), tensor.numel() * tensor.element_size()
        entry.calls += 1
        entry.nbytes += nbytes
        entry.wire += (2 if name.startswith("all-reduce") else 1) * nbytes * (ranks - 1) / ranks

    gather, scatter = DefaultAllGather.__call__, DefaultReduceScatter.__call__
    exchange, reduce = dist.all_to_all_single, dist.all_reduce
    gather_tensor, scatter_tensor = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    now = []

    def named(call):
        def called(params, *args, **kwargs):
            now.append("experts" if "experts" in params[0]._param_fqn else "dense")
            try:
                return call(params, *args, **kwargs)
            finally:
                now.pop()

        return called

    def all_gather(self, output_tensor, input_tensor, group, *args, **kwargs):
        count(f"all-gather {now[-1]}", output_tensor, group)
        return gather(self, output_tensor, input_tensor, group, *args, **kwargs)

    def reduce_scatter(self, output_tensor, input_tensor, group, *args, **kwargs):
        count(f"reduce-scatter {now[-1]}", input_tensor, group)
        return scatter(self, output_tensor, input_tensor, group, *args, **kwargs)

    def all_reduce(tensor, *args, **kwargs):
        if now:
            count(f"all-reduce {now[-1]}", tensor, kwargs["group"])
        return reduce(tensor, *args, **kwargs)

    def all_to_all(output, input, *args, **kwargs):
        rows = "weights" if input.dim() == 1 else "tokens"
        what = "counts" if input.dtype == torch.int64 else rows if args else "sp"  # rows have split sizes
        group = kwargs["group"]
        if etp_group is not None and group is etp_group:
            ranks = dist.get_world_size(group)
            count(f"all-to-all etp {what}", input.new_empty(input.numel() // (ranks - 1) * ranks), group)
        else:
            count(f"all-to-all {what}", input, group)
        return exchange(output, input, *args, **kwargs)

    def all_gather_etp(output, input, *args, **kwargs):
        if etp_group is not None and kwargs.get("group") is etp_group:
            what = "counts" if input.dtype == torch.int64 else "adapters"
            count(f"all-gather etp {what}", output, etp_group)
        return gather_tensor(output, input, *args, **kwargs)

    def reduce_scatter_etp(output, input, *args, **kwargs):
        if etp_group is not None and kwargs.get("group") is etp_group:
            count("reduce-scatter etp adapters", input, etp_group)
        return scatter_tensor(output, input, *args, **kwargs)

    with (
        patch.object(_fsdp_param_group, "foreach_all_gather", named(_fsdp_param_group.foreach_all_gather)),
        patch.object(_fsdp_param_group, "foreach_reduce", named(_fsdp_param_group.foreach_reduce)),
        patch.object(DefaultAllGather, "__call__", all_gather),
        patch.object(DefaultReduceScatter, "__call__", reduce_scatter),
        patch.object(dist, "all_reduce", all_reduce),
        patch.object(dist, "all_to_all_single", all_to_all),
        patch.object(dist, "all_gather_into_tensor", all_gather_etp),
        patch.object(dist, "reduce_scatter_tensor", reduce_scatter_etp),
    ):
        yield counted
