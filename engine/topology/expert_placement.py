"""Decide which dim of an expert parameter is sharded over which axis of the experts' mesh.

A further axis (``etp``: expert tensor parallelism) would get its dim here and nowhere else: meshes come from
``mesh.py``; loading, export, checkpoints and the gradient norm read the placements of the parameter.
"""

import math
from collections.abc import Mapping, Sequence

from torch.distributed.tensor import Placement, Replicate, Shard

from ..errors import SettingError
from .mesh import Topology, divisors

__all__ = ["check_experts_divide", "ep_fsdp_dim", "model_parallel_placements"]


def model_parallel_placements(axes: Sequence[str], ep_dim: int) -> list[Placement]:
    """Return the placements of an expert parameter over the model-parallel axes.

    Args:
        axes: axis names of the mesh, ``("ep",)`` or ``("ep", "etp")``.
        ep_dim: the dim that counts the experts.
    """
    dims: Mapping[str, int] = {"ep": ep_dim}
    return [Shard(dims[axis]) if axis in dims else Replicate() for axis in axes]


def ep_fsdp_dim(shape: Sequence[int], topology: Topology, wanted: int | str = "auto", ep_dim: int = 0) -> int:
    """Return the dim of an expert parameter of global ``shape`` that is sharded over ``ep_fsdp``.

    ``auto`` chooses the experts dim if ``ep_fsdp`` divides the local experts, because FSDP gathers and reduces dim 0
    without an extra copy; else the first other dim that divides (dim 1 of ``[E, ...]``, as in VeOmni); else dim 0, the
    only one that FSDP can shard unevenly (torch ``_fsdp_param.py``).

    Args:
        wanted: ``engine.expert_shard_dim``.
        ep_dim: the dim that counts the experts.

    Raises:
        SettingError: ``ep_fsdp`` does not divide an explicit dim.
    """
    local = list(shape)
    local[ep_dim] //= topology.ep
    if wanted == "auto":
        dims = [ep_dim, *(d for d in range(len(local)) if d != ep_dim)]
        return next((d for d in dims if local[d] % topology.ep_fsdp == 0), 0)
    dim = int(wanted)
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
    """Refuse an expert-parallel size that would split an expert.

    Args:
        num_experts: number of experts of each experts module of the model; empty for a dense one.
        model: its name.

    Raises:
        SettingError: with the sizes that work for all experts modules and for the ranks.
    """
    if not num_experts and topology.ep > 1:
        raise SettingError("engine.ep_size", topology.ep, f"{model} has no experts to split.", "engine.ep_size=1")
    for count in sorted(set(num_experts)):
        if count % topology.ep:
            fits = divisors(math.gcd(topology.fsdp, *num_experts))
            raise SettingError(
                "engine.ep_size",
                topology.ep,
                f"has to divide the number of experts of a layer, which is {count} in {model}.",
                f"engine.ep_size= one of {fits}",
            )
