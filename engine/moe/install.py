"""Have the experts modules of a model computed by ``experts_forward``, and say what brings tokens to them."""

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..compat.transformers_names import set_experts_implementation
from . import deepep, overlap
from .find import CustomExperts, ExpertsInfo
from .forward import ExpertsRuntime, TokenExchange, attach
from .gemm.backends import EXPERTS_IMPLEMENTATION, backend_named
from .overlap import check_overlap
from .shared_experts import SharedExperts

__all__ = ["install_experts_forward"]


def install_experts_forward(
    model: Any,
    experts: Sequence[ExpertsInfo],
    group: dist.ProcessGroup | None,
    etp_group: dist.ProcessGroup | None,
    backend: str,
    *,
    dispatcher: str = "all_to_all",
    chunks: int = 1,
    overlap_shared_experts: bool = False,
) -> None:
    """Replace each experts module's computation by dispatch, the computation of the local experts, and combine.

    Args:
        group: the EP group; None where a single rank holds all experts.
        etp_group: the ranks that share each expert; None where a rank holds its experts whole.
        backend: name of what computes the experts (``moe/gemm/backends.py``).
        dispatcher: what brings tokens to their experts, one of ``deepep.DISPATCHERS``.
        chunks: parts in which a layer's tokens are dispatched, one while another computes.
        overlap_shared_experts: compute a block's shared experts while its tokens are dispatched.

    Raises:
        SettingError: as ``check_overlap``.
    """
    check_overlap(chunks, overlap_shared_experts, dispatcher, model, experts)
    sums = backend_named(backend)
    for info in experts:
        exchange: TokenExchange | None = None
        if group is not None and dispatcher == "deepep":
            exchange = functools.partial(deepep.exchange, num_experts=info.num_experts, group=group, backend=sums)
        elif group is not None and (chunks > 1 or overlap_shared_experts):
            block = model.get_submodule(info.fqn.rpartition(".")[0])
            exchange = functools.partial(
                overlap.exchange,
                num_experts=info.num_experts,
                group=group,
                etp_group=etp_group,
                backend=sums,
                chunks=chunks,
                shared=SharedExperts(block, info.module) if overlap_shared_experts else None,
            )
        attach(info.module, ExpertsRuntime(info.num_experts, group, backend, exchange, etp_group))
    if on_interface := [info.module for info in experts if not isinstance(info.module, CustomExperts)]:
        set_experts_implementation(model, on_interface, EXPERTS_IMPLEMENTATION)
