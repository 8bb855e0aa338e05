"""Parameters that ``etp`` shards, gathered for the experts' linears: those along the hidden dim, or all of them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ...topology.expert_placement import EtpDim

__all__ = ["is_gathered", "with_whole_experts", "with_whole_outputs"]

# The halves of an adapter without the inner dim, and the dim along which they are sharded.
_UP_LORA_A, _DOWN_LORA_B = ("gate_up_proj_lora_A", "up_proj_lora_A"), ("down_proj_lora_B",)


def is_gathered(name: str) -> bool:
    """Whether every rank of ``etp`` computes with the whole parameter, of which it holds a part."""
    return name.endswith((*_UP_LORA_A, *_DOWN_LORA_B))


def with_whole_outputs(weight: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Return an experts module's local parameters in the sizes that its linears need.

    Every rank computes a summand of the outputs, and the bias must be added once: each rank adds its part, padded with
    zeros. The halves of adapters without an inner dim are gathered, and their gradients reduce-scattered. Collective in
    forward and backward if there are such halves.
    """
    whole = dict(weight)
    if "down_proj_bias" in weight:
        bias = weight["down_proj_bias"]
        part, rank, ranks = bias.shape[-1], dist.get_rank(group), dist.get_world_size(group)
        whole["down_proj_bias"] = F.pad(bias, (rank * part, (ranks - 1 - rank) * part))
    for names, dim in ((_UP_LORA_A, 2), (_DOWN_LORA_B, 1)):
        whole |= {name: _Gather.apply(weight[name], dim, group) for name in names if name in weight}
    return whole


def with_whole_experts(
    weight: Mapping[str, torch.Tensor], dims: Mapping[str, EtpDim], group: dist.ProcessGroup
) -> dict[str, torch.Tensor]:
    """Return an experts module's local parameters as with ``etp == 1``; collective in forward and backward.

    Args:
        dims: the sharded dim of each parameter (``ExpertsInfo.etp_dims``).
    """
    whole = dict(weight)
    for name, (dim, parts) in ((name, (of.dim, of.parts)) for name, of in dims.items()):
        gathered = _Gather.apply(weight[name].unflatten(dim, (parts, -1)), dim + 1, group)
        whole[name] = gathered.flatten(dim, dim + 1)
    return whole


class _Gather(torch.autograd.Function):
    """All-gather along a dim; backward reduce-scatters the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        ranks = dist.get_world_size(group)
        parts = part.new_empty(ranks * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(parts, part.contiguous(), group=group)
        return torch.cat(parts.chunk(ranks), dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ranks = dist.get_world_size(ctx.group)
        parts = torch.cat(grads[0].chunk(ranks, ctx.dim))
        part = parts.new_empty(parts.shape[0] // ranks, *parts.shape[1:])
        dist.reduce_scatter_tensor(part, parts, group=ctx.group)
        return part, None, None
