"""Put the fused kernels in place of a model's norms and rotary embeddings."""

import contextlib
import logging
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from .norms import fuse_norms
from .rotary import fuse_rotary, replacements

__all__ = ["fuse_dense", "fused_on_meta"]

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


@contextlib.contextmanager
def fused_on_meta(model: nn.Module) -> Iterator[None]:
    """Replace the same of a model on the meta device, for the planner: its norms for good, and functions meanwhile.

    On meta each kernel is one operator that reads and writes as much as the kernel does.
    """
    fuse_norms(model)
    replaced = list(replacements(model))
    for file, name, _, fused in replaced:
        if fused is not None:
            fused.device = "meta"
            setattr(file, name, fused)
    try:
        yield
    finally:
        for file, name, before, _ in replaced:
            setattr(file, name, before)
