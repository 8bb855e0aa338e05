"""Every legal mesh of a cluster: what a model needs on it, what a step takes, and which one is recommended."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...engine.errors import SettingError
from ...engine.fsdp.options import ShardingOptions
from ...engine.planner.memory import Batch, MemoryPoint, peak
from ...engine.planner.model_sizes import ModelSizes, unit_sizes
from ...engine.planner.traffic import Collective, collectives
from ...engine.topology.expert_placement import check_experts_divide, check_inner_divides
from ...engine.topology.mesh import Topology, divisors
from .roofline import Cluster, Roofline, roofline, seconds

__all__ = ["Choice", "Request", "choices", "recommended", "smallest"]

_GIB = 1 << 30
_MOST_NODES = 128


@dataclass(frozen=True)
class Request:
    """What is asked: ``batch`` is of one rank with ``sp`` = 1, in ``sequences`` sequences to a micro-batch."""

    sizes: ModelSizes
    options: ShardingOptions
    batch: Batch
    sequences: int
    optimizer: Any = "adamw"
    reserve: float = 4.0
    margin: float = 0.1


@dataclass(frozen=True)
class Choice:
    """One mesh, what it needs and what it takes."""

    topology: Topology
    batch: Batch
    peak: MemoryPoint
    traffic: list[Collective]
    time: Roofline
    sync: float
    limit: float
    reserve: float

    @property
    def sp(self) -> int:
        return self.batch.sp

    @property
    def gib(self) -> float:
        return self.peak.total / _GIB + self.reserve

    @property
    def fits(self) -> bool:
        return self.gib <= self.limit

    @property
    def room(self) -> float:
        """GiB that a rank's tensors may have."""
        return self.limit - self.reserve

    @property
    def settings(self) -> list[str]:
        """As on the command line."""
        fsdp = -1 if self.topology.dp_replicate == 1 else self.topology.fsdp
        values = {"ep_size": self.topology.ep, "fsdp_size": fsdp, "ulysses_sequence_parallel_size": self.sp}
        if self.topology.etp > 1:
            values["etp_size"] = self.topology.etp
        return [f"engine.{name}={value}" for name, value in values.items()]

    def wire(self, kind: str) -> float:
        """Return the bytes of a kind that the rank receives in a step."""
        return sum(c.wire for c in self.traffic if c.name.endswith(kind))

    def as_json(self) -> dict[str, Any]:
        t = self.topology
        return {
            **{"ep": t.ep, "etp": t.etp, "ep_fsdp": t.ep_fsdp, "dp_replicate": t.dp_replicate, "sp": self.sp},
            "settings": self.settings,
            "peak": self.peak.when,
            "bytes": {**self.peak.parts, "total": self.peak.total},
            **{"gib_with_reserve": self.gib, "fits": self.fits},
            "collectives": [{**asdict(c), "wire": c.wire} for c in self.traffic],
            "seconds": {**asdict(self.time), "step": self.time.step, "sync": self.sync},
        }


def choices(request: Request, cluster: Cluster) -> list[Choice]:
    """Return every mesh that ``engine/topology/mesh.py`` and ``expert_placement.py`` allow, the fastest first."""
    shared = [sp for sp in divisors(cluster.world) if request.sizes.heads % sp == 0 and request.batch.tokens % sp == 0]
    found = [_choice(request, cluster, topology, sp) for topology in _meshes(request, cluster.world) for sp in shared]
    return sorted(found, key=lambda c: (c.time.step, c.gib))


def _meshes(request: Request, world: int) -> Iterator[Topology]:
    sizes = request.sizes
    for fsdp in divisors(world):
        for ep in divisors(fsdp):
            for etp in divisors(fsdp // ep):
                topology = Topology.arrange(world, ep, fsdp, etp)
                with suppress(SettingError):
                    check_experts_divide(sizes.num_experts, topology, sizes.name)
                    check_inner_divides(sizes.etp_sizes, topology, sizes.name)
                    unit_sizes(sizes, topology, request.options.expert_shard_dim)
                    yield topology


def _choice(request: Request, cluster: Cluster, topology: Topology, sp: int) -> Choice:
    sizes, options, given = request.sizes, request.options, request.batch
    # The ranks of a sequence share its micro-batch, so each has as many more of them.
    batch = replace(given, tokens=given.tokens // sp, micro_batches=given.micro_batches * sp, sp=sp)
    traffic = collectives(sizes, topology, options, batch)
    return Choice(
        topology,
        batch,
        peak(sizes, topology, options, batch, request.optimizer),
        traffic,
        roofline(sizes, topology, options, batch, cluster, traffic, given.tokens // request.sequences),
        _sync(sizes, topology, options, cluster),
        cluster.gib * (1 - request.margin),
        request.reserve,
    )


def _sync(sizes: ModelSizes, topology: Topology, options: ShardingOptions, cluster: Cluster) -> float:
    """Return the seconds of a full sync: every rank receives what it does not hold (``plan_sync`` has the others)."""
    itemsize = options.param_dtype.itemsize
    whole = sum(size.full for _, _, size in unit_sizes(sizes, Topology.arrange(1, 1))) * itemsize
    return seconds(Collective("all-gather", topology.fsdp, 1, 1, whole), cluster)


def recommended(found: Sequence[Choice]) -> Choice | None:
    """Return the fastest mesh that fits."""
    return next((choice for choice in found if choice.fits), None)


def smallest(request: Request, cluster: Cluster) -> tuple[Cluster, Choice] | None:
    """Return the fewest nodes of the same shape on which the model fits, and on which mesh."""
    alone = Topology.arrange(1, 1)
    elements = sum(size.full for _, _, size in unit_sizes(request.sizes, alone))
    copies = 3 if request.optimizer == "muon" else 4  # the weights, their gradients and the states
    resident = copies * elements * request.sizes.master.itemsize / _GIB
    for nodes in range(cluster.nodes + 1, _MOST_NODES + 1):
        larger = replace(cluster, nodes=nodes)
        if resident / larger.world + request.reserve > cluster.gib * (1 - request.margin):
            continue
        best = recommended(choices(request, larger))
        if best is not None:
            return larger, best
    return None
