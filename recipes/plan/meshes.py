"""Predict memory, step time and sync time on every legal mesh of a cluster, and recommend one."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...engine.config.automatic import AutomaticOverlap
from ...engine.errors import SettingError
from ...engine.fsdp.options import ShardingOptions
from ...engine.planner.memory import Batch, MemoryPoint, peak, timeline
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
    """The planner's input.

    Args:
        batch: of one rank with ``sp`` = 1.
        sequences: per micro-batch.
        reserve: GiB of a GPU for contexts, NCCL and a sleeping rollout.
        margin: share of a GPU's memory that stays free.
    """

    sizes: ModelSizes
    options: ShardingOptions
    batch: Batch
    sequences: int
    optimizer: Any = "adamw"
    reserve: float = 4.0
    margin: float = 0.1
    overlap: AutomaticOverlap = AutomaticOverlap(None, False, False)

    def on(self, topology: Topology, batch: Batch) -> ShardingOptions:
        """Return the options of a run on GPUs on this mesh, with overlap resolved from its sizes."""
        return self.overlap.on(self.options, topology, batch.tokens)


@dataclass(frozen=True)
class Choice:
    """One mesh, with its predicted memory, traffic and times.

    Args:
        sync: seconds of a full weight sync.
        limit, reserve: GiB of a GPU that a plan may use, and GiB of these for anything but tensors.
    """

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
        """GiB for a rank's tensors."""
        return self.limit - self.reserve

    @property
    def settings(self) -> list[str]:
        """Overrides of a run's command line."""
        fsdp = -1 if self.topology.dp_replicate == 1 else self.topology.fsdp
        values = {"ep_size": self.topology.ep, "fsdp_size": fsdp, "ulysses_sequence_parallel_size": self.sp}
        if self.topology.etp > 1:
            values["etp_size"] = self.topology.etp
        return [f"engine.{name}={value}" for name, value in values.items()]

    def wire(self, kind: str) -> float:
        """Return the bytes that the rank receives in a step, by collectives whose name ends with ``kind``."""
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
    return _fastest_first(_choice(request, cluster, *mesh) for mesh in _meshes(request, cluster.world))


def _fastest_first(found: Iterable[Choice]) -> list[Choice]:
    return sorted(found, key=lambda c: (c.time.step, c.gib))


def _meshes(request: Request, world: int) -> Iterator[tuple[Topology, int]]:
    """Yield every mesh with every sequence-parallel size."""
    sizes = request.sizes
    shared = [sp for sp in divisors(world) if sizes.heads % sp == 0 and request.batch.tokens % sp == 0]
    for fsdp in divisors(world):
        for ep in divisors(fsdp):
            for etp in divisors(fsdp // ep):
                topology = Topology.arrange(world, ep, fsdp, etp)
                with suppress(SettingError):
                    check_experts_divide(sizes.num_experts, topology, sizes.name)
                    check_inner_divides(sizes.etp_sizes, topology, sizes.name)
                    unit_sizes(sizes, topology, request.options.expert_shard_dim)
                    yield from ((topology, sp) for sp in shared)


def _batch(request: Request, sp: int) -> Batch:
    """Return a rank's batch: ``sp`` ranks share each micro-batch, so each rank runs ``sp`` times as many."""
    given = request.batch
    return replace(given, tokens=given.tokens // sp, micro_batches=given.micro_batches * sp, sp=sp)


def _choice(request: Request, cluster: Cluster, topology: Topology, sp: int) -> Choice:
    sizes, batch = request.sizes, _batch(request, sp)
    options = request.on(topology, batch)
    traffic = collectives(sizes, topology, options, batch)
    return Choice(
        topology,
        batch,
        peak(sizes, topology, options, batch, request.optimizer),
        traffic,
        roofline(
            *(sizes, topology, options, batch, cluster, traffic),
            length=request.batch.tokens // request.sequences,
            optimizer=request.optimizer,
        ),
        _sync(sizes, topology, options, cluster),
        cluster.gib * (1 - request.margin),
        request.reserve,
    )


def _sync(sizes: ModelSizes, topology: Topology, options: ShardingOptions, cluster: Cluster) -> float:
    """Return the seconds of a full sync: an all-gather of the whole model (``plan_sync`` has the other modes)."""
    itemsize = options.param_dtype.itemsize
    whole = sum(size.full for _, _, size in unit_sizes(sizes, Topology.arrange(1, 1))) * itemsize
    return seconds(Collective("all-gather", topology.fsdp, 1, 1, whole), cluster)


def recommended(found: Sequence[Choice]) -> Choice | None:
    """Return the fastest mesh that fits."""
    return next((choice for choice in found if choice.fits), None)


def smallest(request: Request, cluster: Cluster) -> tuple[Cluster, Choice] | None:
    """Return the smallest cluster of such nodes on which the model fits, and the fastest mesh on it."""
    alone = Topology.arrange(1, 1)
    elements = sum(size.full for _, _, size in unit_sizes(request.sizes, alone))
    copies = 3 if request.optimizer == "muon" else 4  # weights, gradients and states
    resident = copies * elements * request.sizes.master.itemsize / _GIB
    for nodes in range(cluster.nodes + 1, _MOST_NODES + 1):
        larger = replace(cluster, nodes=nodes)
        if resident / larger.world + request.reserve > cluster.gib * (1 - request.margin):
            continue
        fitting = [mesh for mesh in _meshes(request, larger.world) if _fits(request, larger, *mesh)]
        if fitting:
            return larger, _fastest_first(_choice(request, larger, *mesh) for mesh in fitting)[0]
    return None


def _fits(request: Request, cluster: Cluster, topology: Topology, sp: int) -> bool:
    """Return whether every point of a step fits; stop at the first that does not."""
    room = (cluster.gib * (1 - request.margin) - request.reserve) * _GIB
    batch = _batch(request, sp)
    points = timeline(request.sizes, topology, request.on(topology, batch), batch, request.optimizer)
    return all(point.total <= room for point in points)
