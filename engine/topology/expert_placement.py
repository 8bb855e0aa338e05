"""Choose the dims of expert parameters that the axes of the experts' mesh shard."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..errors import SettingError
from .mesh import Topology, check_divides

__all__ = ["EtpDim", "check_experts_divide", "check_inner_divides", "ep_fsdp_dim", "model_parallel_placements"]


@dataclass(frozen=True)
class EtpDim:
    """The dim of an expert parameter that is sharded over ``etp``, in equal parts: 2 for concatenated gate and up."""

    dim: int
    parts: int = 1


def model_parallel_placements(axes: Sequence[str], ep_dim: int, etp_dim: EtpDim | None = None) -> list[Placement]:
    """Return the placements of an expert parameter over the axes ``("ep",)`` or ``("ep", "etp")``."""
    placements: dict[str, Placement] = {"ep": Shard(ep_dim)}
    if etp_dim is not None:
        dim, parts = etp_dim.dim, etp_dim.parts
        placements["etp"] = Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
    return [placements.get(axis, Replicate()) for axis in axes]


def ep_fsdp_dim(
    shape: Sequence[int],
    topology: Topology,
    wanted: int | str = "auto",
    ep_dim: int = 0,
    etp_dim: EtpDim | None = None,
) -> int:
    """Return the dim of an expert parameter of global ``shape`` that is sharded over ``ep_fsdp``.

    ``auto`` chooses the experts dim if ``ep_fsdp`` divides the local experts, because FSDP gathers and reduces dim 0
    without an extra copy. Otherwise it chooses the first other dim that divides (dim 1 of ``[E, ...]``, as in VeOmni).
    If none divides it is dim 0, the only one that FSDP can shard unevenly (torch ``_fsdp_param.py``). The dim that
    ``etp`` shards is never chosen; if it is ``wanted`` (``engine.expert_shard_dim``), the third dim is.

    Raises:
        SettingError: ``ep_fsdp`` does not divide an explicit dim.
    """
    local = list(shape)
    local[ep_dim] //= topology.ep
    over_etp = etp_dim.dim if etp_dim is not None and topology.etp > 1 else None
    free = [d for d in range(len(local)) if d not in (ep_dim, over_etp)]
    if wanted == "auto":
        return next((d for d in (ep_dim, *free) if local[d] % topology.ep_fsdp == 0), 0)
    dim = int(wanted)
    if dim == over_etp and not free:
        return ep_dim  # a bias; FSDP shards dim 0 unevenly
    dim = free[0] if dim == over_etp else dim
    if dim >= len(local):
        dim = ep_dim  # a bias or a scale, one entry per expert
    if local[dim] % topology.ep_fsdp:
        raise SettingError(
            "engine.expert_shard_dim",
            dim,
            f"an expert weight has size {local[dim]} along this dim on one EP rank, which ep_fsdp={topology.ep_fsdp} "
            "does not divide.",
            "engine.expert_shard_dim=auto",
        )
    return dim


def check_experts_divide(num_experts: Sequence[int], topology: Topology, model: str) -> None:
    """Refuse an expert-parallel size that would split an expert; ``num_experts`` of each module, none if dense.

    Raises:
        SettingError: with the sizes that divide all experts modules and the ranks.
    """
    what = "the number of experts of a layer, which is {0} in {1}"
    _check_split("engine.ep_size", topology.ep, num_experts, topology.fsdp, what, model)


def check_inner_divides(inner: Sequence[int], topology: Topology, model: str) -> None:
    """Refuse an expert tensor-parallel size that does not divide the inner dims of the experts, gate and up apart.

    Raises:
        SettingError: with the sizes that divide all experts modules and the ranks.
    """
    what = "the inner size of the experts, and with biases or adapters their hidden size; {1} has {0}"
    _check_split("engine.etp_size", topology.etp, inner, topology.fsdp // topology.ep, what, model)


def _check_split(setting: str, size: int, wholes: Sequence[int], ranks: int, what: str, model: str) -> None:
    if not wholes and size > 1:
        raise SettingError(setting, size, f"{model} has no experts to split.", f"{setting}=1")
    for whole in sorted(set(wholes)):
        check_divides(setting, size, whole, what.format(whole, model), math.gcd(ranks, *wholes))
