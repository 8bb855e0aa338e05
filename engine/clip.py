"""One gradient norm over parameters of different meshes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from .mesh import Meshes
from .shards import local_tensor

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float, meshes: Meshes) -> torch.Tensor:
    """Scale gradients so that their global 2-norm is at most ``max_norm``.

    The ranks of a replica cut every parameter, dense or expert, without overlap. So the squares of the local shards,
    summed in float32, give the norm by one all-reduce over the replica. Replicas hold equal gradients.

    Args:
        parameters: sharded parameters; those without a gradient are passed over.

    Returns:
        The norm before clipping, a float32 scalar, equal on all ranks. Where it is not finite nothing was scaled.
    """
    grads = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    device = torch.device(meshes.dense.device_type)
    squares = [torch.linalg.vector_norm(g, dtype=torch.float32).square() for g in grads]
    total = torch.stack(squares).sum().to(device) if squares else torch.zeros((), device=device)
    dist.all_reduce(total, group=meshes.replica_group)
    norm = total.sqrt()
    if torch.isfinite(norm):
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device))
    return norm
