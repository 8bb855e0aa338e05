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
        batch: of one rank with ``sp`` = 1; a micro-batch has ``sequences``.
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
    overlap: AutomaticOverlap = AutomaticOverlap()

    def on(self, topology: Topology, sp: int) -> tuple[ShardingOptions, Batch]:
        """Return the options of a run on GPUs, with overlap resolved from sizes, and the batch of a rank.

        ``sp`` ranks share each micro-batch, so each rank runs ``sp`` times as many.
        """
        tokens, micro_batches = self.batch.tokens // sp, self.batch.micro_batches * sp
        batch = replace(self.batch, tokens=tokens, micro_batches=micro_batches, sp=sp)
        return self.overlap.on(self.options, topology, batch.tokens), batch

    def room(self, cluster: Cluster) -> float:
        """Return the GiB of a GPU that a rank's tensors may have."""
        return cluster.gib * (1 - self.margin) - self.reserve


@dataclass(frozen=True)
class Choice:
    """One mesh, with its predicted memory, traffic and times.

    Args:
        sync: seconds of a full weight sync.
        room: GiB of a GPU that a rank's tensors may have, ``reserve`` not included.
    """

    topology: Topology
    batch: Batch
    peak: MemoryPoint
    traffic: list[Collective]
    time: Roofline
    sync: float
    room: float
    reserve: float

    @property
    def sp(self) -> int:
        return self.batch.sp

    @property
    def gib(self) -> float:
        return self.peak.total / _GIB + self.reserve

    @property
    def fits(self) -> bool:
        return self.gib <= self.room + self.reserve

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
    return _fastest_first(request, cluster, _meshes(request, cluster.world))


def _fastest_first(request: Request, cluster: Cluster, meshes: Iterable[tuple[Topology, int]]) -> list[Choice]:
    return sorted((_choice(request, cluster, *mesh) for mesh in meshes), key=lambda c: (c.time.step, c.gib))


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


def _choice(request: Request, cluster: Cluster, topology: Topology, sp: int) -> Choice:
    sizes, optimizer, (options, batch) = request.sizes, request.optimizer, request.on(topology, sp)
    traffic = collectives(sizes, topology, options, batch)
    length = request.batch.tokens // request.sequences
    # A full sync is an all-gather of the whole model (``plan_sync`` has the other modes).
    nbytes = _elements(sizes) * options.param_dtype.itemsize
    return Choice(
        topology,
        batch,
        peak(sizes, topology, options, batch, optimizer),
        traffic,
        roofline(sizes, topology, options, batch, cluster, traffic, length, optimizer),
        seconds(Collective("all-gather", topology.fsdp, 1, 1, nbytes), cluster),
        request.room(cluster),
        request.reserve,
    )


def _elements(sizes: ModelSizes) -> int:
    return sum(size.full for _, _, size in unit_sizes(sizes, Topology.arrange(1, 1)))


def recommended(found: Sequence[Choice]) -> Choice | None:
    """Return the fastest mesh that fits."""
    return next((choice for choice in found if choice.fits), None)


def smallest(request: Request, cluster: Cluster) -> tuple[Cluster, Choice] | None:
    """Return the smallest cluster of such nodes on which the model fits, and the fastest mesh on it."""
    copies = 3 if request.optimizer == "muon" else 4  # weights, gradients and states
    resident = copies * _elements(request.sizes) * request.sizes.master.itemsize
    room = request.room(cluster) * _GIB

    def fits(topology: Topology, sp: int) -> bool:
        # ``all`` stops at the first point of a step that does not fit.
        points = timeline(request.sizes, topology, *request.on(topology, sp), request.optimizer)
        return all(point.total <= room for point in points)

    for nodes in range(cluster.nodes + 1, _MOST_NODES + 1):
        larger = replace(cluster, nodes=nodes)
        if resident / larger.world <= room:
            fitting = [mesh for mesh in _meshes(request, larger.world) if fits(*mesh)]
            if fitting:
                return larger, _fastest_first(request, larger, fitting)[0]
    return None
