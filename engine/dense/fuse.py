"""Put the fused kernels in place of a model's norms and rotary embeddings."""

import logging

import torch.distributed as dist
from torch import nn

from .norms import fuse_norms
from .rotary import fuse_rotary

__all__ = ["fuse_dense"]

logger = logging.getLogger("epfsdp2")


def fuse_dense(model: nn.Module) -> None:
    """Replace what is shown to compute the same, and log it; for a model on a GPU, or still on the meta device."""
    norms, rotary = fuse_norms(model), fuse_rotary(model)
    if dist.get_rank() == 0:
        names = [
            *(f"{count} {name}" for name, count in sorted(norms.items())),
            *(n for n, fused in rotary.items() if fused),
        ]
        logger.info("epfsdp2: fused: %s", ", ".join(names) or "nothing")
        if left := [name for name, fused in rotary.items() if not fused]:
            logger.info("epfsdp2: rotate in their own way and run as they are: %s", ", ".join(left))
