"""Clip gradients by one norm over parameters of different meshes, and skip steps whose norm is not finite."""

import logging
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from ..topology.dtensor import local_tensor, shard_steps
from ..topology.mesh import Meshes

__all__ = ["ClippedStep", "clip_grad_norm_"]

logger = logging.getLogger("epfsdp2")


class ClippedStep:
    """Clips and steps; skips the step on all ranks, and counts it, if the norm is not finite.

    Args:
        max_norm: as in ``clip_grad_norm_``.

    Attributes:
        skipped: steps skipped so far.
    """

    def __init__(self, max_norm: float | None, meshes: Meshes):
        self.max_norm, self.meshes = max_norm, meshes
        self.skipped = 0

    def __call__(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Step ``optimizer`` on gradients clipped over all its parameters.

        Returns:
            The norm before clipping, equal on all ranks, so they all step or all skip.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = clip_grad_norm_(parameters, self.max_norm, self.meshes)
        if torch.isfinite(norm):
            optimizer.step()
            return norm
        self.skipped += 1
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            logger.warning(
                "epfsdp2: the gradient norm is %s: this step is skipped on all ranks (%d so far)",
                norm.item(),
                self.skipped,
            )
        return norm


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float | None, meshes: Meshes) -> torch.Tensor:
    """Scale gradients so that their global 2-norm is at most ``max_norm``.

    Every parameter, dense or expert, is sharded over the ranks of a replica without overlap. So the squares of the
    local shards, summed in float32, give the norm by one all-reduce over the replica. Replicas hold equal gradients. A
    shard that several ranks of a replica hold (its parameter is not sharded over one of the axes) counts once.

    Args:
        parameters: sharded parameters; those without a gradient are ignored. Gradients may be on any device, also on
            the host (CPU offload).
        max_norm: no clipping if it is ``None``, infinite, or not positive.

    Returns:
        The norm before clipping, a float32 scalar, equal on all ranks. If it is not finite, nothing was scaled.
    """
    shards: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            shard = local_tensor(param.grad)
            shards.setdefault((shard.device, _copies(param.grad, meshes)), []).append(shard)

    total = torch.zeros((), dtype=torch.float32, device=meshes.dense.device_type)
    for (_, copies), group in shards.items():
        norms = torch._foreach_norm(group, 2, dtype=torch.float32)
        total += (torch.stack(norms).square().sum() / copies).to(total.device)
    dist.all_reduce(total, group=meshes.replica_group)
    norm = total.sqrt()
    if max_norm is not None and 0 < max_norm < float("inf") and torch.isfinite(norm):
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for (device, _), group in shards.items():
            torch._foreach_mul_(group, scale.to(device))
    return norm


def _copies(grad: torch.Tensor, meshes: Meshes) -> int:
    """Return how many ranks of a replica hold this rank's shard of a gradient."""
    return meshes.topology.fsdp // math.prod(step.parts for step in shard_steps(grad))
