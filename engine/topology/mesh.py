"""Arrange ranks in meshes; the only file that does rank arithmetic.

Experts are on the mesh ``(dp_replicate, ep_fsdp, ep, etp)``, without ``etp`` if it is 1. The last axis is the fastest,
so the ranks of an EP group are adjacent. All other parameters are on ``(dp_replicate, fsdp)``. A *replica* is the block
of ``ep_fsdp * ep * etp == fsdp`` ranks that holds the model once. ``parallelize.py`` has an example.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import SettingError

__all__ = [
    "Meshes",
    "Topology",
    "build_meshes",
    "build_sequence_mesh",
    "check_divides",
    "check_sequence_size",
    "divisors",
]


@dataclass(frozen=True)
class Topology:
    """The sizes of the mesh axes of ``world`` ranks; ``etp`` ranks share each expert."""

    world: int
    ep: int
    ep_fsdp: int
    dp_replicate: int
    etp: int = 1

    @classmethod
    def arrange(cls, world: int, ep_size: int, fsdp_size: int = -1, etp_size: int = 1) -> "Topology":
        """Arrange ``world`` ranks; ``fsdp_size`` share one copy of the model, -1 for all.

        Raises:
            SettingError: the sizes do not multiply to ``world``.
        """
        replica = world if fsdp_size == -1 else fsdp_size
        check_divides("engine.fsdp_size", replica, world, f"the number of ranks, {world}")
        copies = "" if replica == world else f" of one copy of the model (engine.fsdp_size={fsdp_size})"
        ranks = f"the number of ranks{copies}, {replica} (ep * ep_fsdp * dp_replicate == {world})"
        check_divides("engine.ep_size", ep_size, replica, ranks)
        ranks = f"the number of ranks of one copy of the model by engine.ep_size, {replica} / {ep_size}"
        ranks += f" (ep * etp * ep_fsdp * dp_replicate == {world})"
        check_divides("engine.etp_size", etp_size, replica // ep_size, ranks)
        return cls(world, ep_size, replica // ep_size // etp_size, world // replica, etp_size)

    @property
    def fsdp(self) -> int:
        """Ranks that share one copy of the model."""
        return self.world // self.dp_replicate

    @property
    def expert_axes(self) -> dict[str, int]:
        """The axes of the experts' mesh and their sizes, slowest first; without ``etp`` if it is 1."""
        axes = {"dp_replicate": self.dp_replicate, "ep_fsdp": self.ep_fsdp, "ep": self.ep}
        return {**axes, "etp": self.etp} if self.etp > 1 else axes

    @property
    def model_parallel_axes(self) -> tuple[str, ...]:
        """The axes that shard the experts before FSDP does: ``ep``, and ``etp`` if it is not 1."""
        return tuple(self.expert_axes)[2:]

    def communicators(self, sp: int = 1) -> dict[str, int]:
        """Return the process groups in which a rank communicates, and their numbers of ranks.

        An axis of all ranks has the world's group (``init_device_mesh``), except ``ep`` and ``etp``. Both meshes share
        the group of ``dp_replicate`` (``build_meshes``). ``sp`` ranks share packed rows.
        """
        axes = {"fsdp": self.fsdp, **self.expert_axes, "sp": sp, "dp": self.world // sp if sp > 1 else 1}
        own = {name: size for name, size in axes.items() if 1 < size < self.world or name in ("ep", "etp") and size > 1}
        return {"world": self.world, **own} if self.world > 1 else {}

    def coordinate(self, fsdp_rank: int) -> dict[str, int]:
        """Return the index of a replica's ``fsdp_rank``-th rank on each sharding axis of both meshes."""
        at, rest = {"fsdp": fsdp_rank}, fsdp_rank
        for axis, size in reversed(list(self.expert_axes.items())[1:]):
            rest, at[axis] = divmod(rest, size)
        return at


@dataclass(frozen=True)
class Meshes:
    """The two device meshes of one topology: ``(dp_replicate, fsdp)``, and ``Topology.expert_axes``."""

    topology: Topology
    dense: DeviceMesh
    experts: DeviceMesh

    @property
    def dense_shard(self) -> DeviceMesh:
        """The mesh for ``fully_shard`` of dense parameters; 2-D (HSDP) only with several replicas."""
        return self.dense if self.topology.dp_replicate > 1 else self.dense["fsdp"]

    @property
    def experts_shard(self) -> DeviceMesh:
        """The mesh for ``fully_shard`` of experts, within one EP rank."""
        return self.experts["dp_replicate", "ep_fsdp"] if self.topology.dp_replicate > 1 else self.experts["ep_fsdp"]

    @property
    def ep(self) -> DeviceMesh:
        return self.experts["ep"]

    @property
    def etp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share each of this rank's experts; None if it holds them whole."""
        return self.experts.get_group("etp") if self.topology.etp > 1 else None

    @property
    def model_parallel(self) -> DeviceMesh:
        """The experts' mesh without the axes that FSDP shards and replicates over."""
        return self.experts[self.topology.model_parallel_axes]

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's replica, in ``fsdp`` order."""
        return self.dense.get_group("fsdp")

    @property
    def reduces_by_nccl(self) -> bool:
        """Whether NCCL reduces the gradients; ranks on GPUs may also use gloo, which has fewer operations."""
        return f"{self.dense.device_type}:nccl" in dist.get_backend_config(self.replica_group).split(",")

    @property
    def fsdp_rank(self) -> int:
        return self.dense.get_local_rank("fsdp")


def build_meshes(device_type: str, topology: Topology) -> Meshes:
    """Create the meshes of ``topology`` and their process groups; collective.

    Both share the group of ``dp_replicate``, because each communicator needs memory. ``ep`` and ``etp`` have groups of
    their own, even if they span all ranks: in one group, tokens would wait for FSDP's weights.
    """
    t, axes = topology, topology.expert_axes
    dense = init_device_mesh(device_type, (t.dp_replicate, t.fsdp), mesh_dim_names=("dp_replicate", "fsdp"))
    if t.dp_replicate == 1 and (max(t.ep, t.etp) < t.world or t.world == 1):
        return Meshes(t, dense, init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes)))
    ranks = torch.arange(t.world).view(*axes.values())
    groups = [dense.get_group("dp_replicate")]
    for dim in range(1, len(axes)):
        of_axis = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
        groups.append(dist.new_subgroups_by_enumeration(of_axis)[0])
    return Meshes(t, dense, DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes)))


def check_sequence_size(world: int, size: int) -> None:
    """Raise a ``SettingError`` if ``size`` ranks can't share each packed row: ``size`` does not divide ``world``."""
    ranks = f"the number of ranks, {world} (dp * sp == {world})"
    check_divides("engine.ulysses_sequence_parallel_size", size, world, ranks)


def build_sequence_mesh(device_type: str, world: int, size: int) -> DeviceMesh:
    """Create the mesh ``(dp, sp)``, ``sp`` fastest, whose sp groups share packed rows; collective.

    Raises:
        SettingError: see ``check_sequence_size``.
    """
    check_sequence_size(world, size)
    return init_device_mesh(device_type, (world // size, size), mesh_dim_names=("dp", "sp"))


def check_divides(setting: str, size: int, whole: int, what: str, fits: int | None = None) -> None:
    """Raise a ``SettingError`` if ``size`` does not divide ``whole``, which is ``what``; divisors of ``fits`` work."""
    if size < 1 or whole % size:
        works = f"{setting}= one of {divisors(fits or whole)}"
        raise SettingError(setting, size, f"has to divide {what}.", works)


def divisors(n: int) -> list[int]:
    """Return the divisors of ``n``, in ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]
