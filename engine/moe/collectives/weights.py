"""What the ranks of an ``etp`` group hold parts of along the hidden dim, and compute with as a whole."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.nn import functional as F

__all__ = ["with_whole_outputs"]


def with_whole_outputs(weight: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Return an experts module's local parameters as its linears take them.

    Every rank of the group computes a summand of the outputs, so their bias is to be added once: each rank adds its
    part, and zeros elsewhere.
    """
    whole = dict(weight)
    if "down_proj_bias" in weight:
        bias = weight["down_proj_bias"]
        part, rank, ranks = bias.shape[-1], dist.get_rank(group), dist.get_world_size(group)
        whole["down_proj_bias"] = F.pad(bias, (rank * part, (ranks - 1 - rank) * part))
    return whole
