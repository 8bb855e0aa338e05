"""Local experts computed by a function that is registered with transformers (``engine.experts_backend``).

The function expects all experts and the tokens of one process. Here a token is a dispatched row, with one expert, local
to this rank, and a routing weight of 1, because combine applies the weights.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..compat.transformers_names import ALL_EXPERTS_FUNCTIONS
from .gemm.backends import REGISTERED

__all__ = ["compute_registered"]


class _LocalExperts:
    """A view of an experts module with this rank's experts."""

    def __init__(self, module: Any, weight: Mapping[str, torch.Tensor], num_experts: int):
        self._module, self._weight, self.num_experts = module, weight, num_experts

    def __getattr__(self, name: str) -> Any:
        return self._weight[name] if name in self._weight else getattr(self._module, name)


def compute_registered(
    backend: str, module: Any, weight: Mapping[str, torch.Tensor], rows_RD: torch.Tensor, counts_e: torch.Tensor
) -> torch.Tensor:
    """Compute the local experts on rows that are grouped by expert; returns ``(R, D)``.

    Args:
        backend: ``transformers:NAME``.
        weight: the module's own parameters by name, local to this rank.
        counts_e: int64 ``(e,)``, rows per local expert, summing to ``R``; entries may be 0.
    """
    if rows_RD.shape[0] == 0:
        # A function may not expect this. Gradients are dense: FSDP would skip a None on this rank only.
        return rows_RD + sum(param.flatten()[:0].sum() for param in weight.values())
    function = ALL_EXPERTS_FUNCTIONS[backend.removeprefix(REGISTERED)]
    experts_R = torch.repeat_interleave(counts_e, output_size=rows_RD.shape[0])
    local = _LocalExperts(module, weight, counts_e.shape[0])
    return function(local, rows_RD, experts_R[:, None], rows_RD.new_ones(rows_RD.shape[0], 1))
