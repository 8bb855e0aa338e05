"""Free what FSDP has gathered."""

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["reshard_all"]


def reshard_all(model: nn.Module) -> None:
    """Free every gathered parameter; ``FSDPModule.reshard`` alone frees one module's."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
