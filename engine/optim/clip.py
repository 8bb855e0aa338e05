"""Clip gradients by one norm over parameters of different meshes, and skip steps whose norm is not finite."""

import logging
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from ..topology.dtensor import local_tensor, shard_steps
from ..topology.mesh import Meshes
from .loss_scale import LossScale

__all__ = ["ClippedStep", "clip_grad_norm_"]

logger = logging.getLogger("epfsdp2")


class ClippedStep:
    """Clips and steps; skips the step on all ranks, and counts it, if the norm is not finite.

    Args:
        max_norm: see ``clip_grad_norm_``.
        loss_scale: adapted after each step; None for a loss without one.
        apart: parameters that are clipped by a norm of their own, and leave other parameters' steps unchanged.

    Attributes:
        skipped: number of steps skipped so far.
    """

    def __init__(
        self,
        max_norm: float | None,
        meshes: Meshes,
        loss_scale: LossScale | None = None,
        apart: Iterable[torch.Tensor] = (),
    ):
        self.max_norm, self.meshes, self.loss_scale = max_norm, meshes, loss_scale
        self.skipped, self._apart = 0, set(apart)

    def __call__(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Step ``optimizer`` on gradients clipped over all its parameters, but those ``apart``.

        Returns:
            The norm before clipping, without the scale of the loss. It is equal on all ranks, so all step or all skip.

        Raises:
            LossOverflowError: on all ranks, see ``LossScale.update``.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        both = [p for p in parameters if p not in self._apart], [p for p in parameters if p in self._apart]
        norm, *others = (clip_grad_norm_(own, self.max_norm, self.meshes, scale) for own in both if own)
        finite = all(bool(torch.isfinite(each)) for each in (norm, *others))
        if finite:
            optimizer.step()
        else:
            self.skipped += 1
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                of = "" if self.loss_scale is None else f" with the loss scaled by {scale:g}, which is halved"
                said = f"epfsdp2: the gradient norm is {norm.item()}{of}: this step is skipped on all ranks"
                logger.warning("%s (%d so far)", said, self.skipped)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        return norm

    def metrics(self) -> dict[str, float]:
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.value}
        return {"skipped_steps": float(self.skipped), **scale}


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float | None, meshes: Meshes, loss_scale: float = 1.0
) -> torch.Tensor:
    """Scale gradients so that their global 2-norm is at most ``max_norm``.

    Sum the squares of the local shards in float32, each divided by the number of ranks that hold the shard. One
    all-reduce over all ranks gives the norm. Replicas sum in different orders: with a norm each, the norms could differ
    in the last bit, and then the parameters.

    Args:
        parameters: sharded, with or without a gradient, which may be on the host (CPU offload).
        max_norm: no clipping if it is ``None``, infinite, or not positive.
        loss_scale: factor of the loss; the gradients are divided by it.

    Returns:
        The norm before clipping, without ``loss_scale``: a float32 scalar, equal on all ranks. If it is not finite,
        the gradients are unchanged.
    """
    shards: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            shard = local_tensor(param.grad)
            copies = meshes.topology.world // math.prod(step.parts for step in shard_steps(param.grad))
            shards.setdefault((shard.device, copies), []).append(shard)

    total = torch.zeros((), dtype=torch.float32, device=meshes.dense.device_type)
    for (_, copies), group in shards.items():
        norms = torch._foreach_norm(group, 2, dtype=torch.float32)
        total += (torch.stack(norms).square().sum() / copies).to(total.device)
    dist.all_reduce(total)
    norm = total.sqrt() / loss_scale
    factor = torch.full_like(norm, 1 / loss_scale)
    if max_norm is not None and 0 < max_norm < float("inf"):
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) / loss_scale
    factor = torch.where(torch.isfinite(norm), factor, 1.0)
    if factor != 1.0:  # saves a pass over all gradients
        for (device, _), group in shards.items():
            torch._foreach_mul_(group, factor.to(device))
    return norm
