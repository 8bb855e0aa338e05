"""Put the fused kernels in place of a model's norms and rotary embeddings."""

from torch import nn

from .norms import fuse_norms
from .rotary import fuse_rotary

__all__ = ["fuse_dense"]


def fuse_dense(model: nn.Module) -> None:
    """Replace what is shown to compute the same; for a model on a GPU, or still on the meta device."""
    fuse_norms(model)
    fuse_rotary(model)
