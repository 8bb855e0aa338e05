"""What a trainer rank hands to the rollout: everything, or what the worker beside it keeps.

Iterated, the weights of a sync are the ``full`` stream, which every backend of verl takes. An adapter that knows where
its worker is asks for that worker's stream instead (``RolloutWeights.for_rollout``).
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..engine.compat import versions
from ..engine.lora.merge import LocalValues, local_values, weights
from ..engine.model import hf_names
from ..engine.topology.dtensor import local_tensor, persistent_buffers
from ..engine.topology.index_ranges import IndexRange
from ..engine.topology.mesh import Meshes
from ..engine.topology.rank_consistency import check_agreement
from .layout.layout_check import layouts
from .layout.slice_names import Place, places
from .layout.stream_choice import choose_stream, quantisation, rollout_of
from .layout.trainer_tensors import sharded_tensors
from .layout.transfer_plan import Targets, make_plan, round_bytes
from .layout.vllm_layout import Heads, Need, Rollout, Stream, Tensor, needs
from .transport import full_gather
from .transport.cast import CastOnCopy
from .transport.checksums import is_verified
from .transport.exchange import Exchange, Landing
from .transport.report import Handover, SyncReport, Traffic
from .transport.watched_sockets import WeightSyncError

__all__ = ["RolloutSync", "RolloutWeights", "SyncSettings", "WorkerStream"]

logger = logging.getLogger("epfsdp2")


@dataclass(frozen=True)
class SyncSettings:
    """What a user may set.

    Args:
        wanted: ``engine.rollout_sync``.
        memory_bytes: bound of the buffers that a rank holds.
        verified: how many syncs carry checksums; -1 for all of them.
    """

    wanted: str
    memory_bytes: int
    verified: int = 0


class RolloutSync:
    """An engine's side of all its syncs; plans are made once per placement.

    Args:
        model: sharded.
        layers: FQNs of its layers.
        dtypes: in which parameters are sent (``engine/fsdp/wrap_plan.py``, ``compute_dtypes``).
    """

    def __init__(
        self,
        model: Any,
        meshes: Meshes,
        layers: list[str],
        dtypes: Mapping[str, torch.dtype],
        settings: SyncSettings,
    ):
        self.model, self.meshes, self.layers, self.settings = model, meshes, layers, settings
        stored = {name: p.dtype for name, p in weights(model)}
        self.dtypes = {name: full_gather.narrower(dtype, dtypes.get(name)) for name, dtype in stored.items()}
        buffers = persistent_buffers(model)
        self.dtypes |= {name: buffer.dtype for name, buffer in buffers.items()}
        self._buffers = list(buffers)
        self.heads = Heads.of(model.config.get_text_config())
        self._exchanges: dict[tuple[Stream, Rollout, int], Exchange] = {}
        self._needs: dict[tuple[Stream, Rollout, int], dict[str, list[Need]]] = {}
        self._places: dict[tuple[Stream, Rollout, int], dict[tuple[str, IndexRange], list[Place]]] = {}
        self._by_expert: dict[str, bool] = {}
        self._said = ""
        self._begun = 0
        self.last_report: SyncReport | None = None

    def weights(self) -> "RolloutWeights":
        """The weights of one sync."""
        return RolloutWeights(self)

    @property
    def family(self) -> str:
        """``model_type`` of the model."""
        return self.model.config.model_type

    def choose(self, config: Any) -> Stream:
        """The stream for a rollout; says once, on one rank, why ``auto`` came to ``full``."""
        wanted, untested = self.settings.wanted, versions.unknown_layout()
        kind, reason = choose_stream(wanted, config, self.family, untested_vllm=untested)
        if reason and reason != self._said and dist.get_rank() == 0:
            logger.warning("epfsdp2: engine.rollout_sync=auto: full stream, since %s", reason)
        self._said = reason
        return kind

    def full(
        self, traffic: Traffic | None = None, *, as_checkpoint: bool = False
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Everything under names that vLLM takes; a stack that is too large comes as its experts, if it may.

        Args:
            as_checkpoint: under the names of checkpoints alone, which for most families have no stack.
        """
        named = hf_names.as_checkpoint if as_checkpoint else hf_names.for_vllm
        traffic = traffic or Traffic()
        limit = full_gather.gather_bytes(self.settings.memory_bytes, self.meshes.topology.fsdp, is_assembled=True)
        arriving = self._gathered(limit, traffic, self._has_names_by_expert)
        waiting: dict[str, torch.Tensor] = {}
        with contextlib.closing(arriving):
            for rows in full_gather.assembled(arriving, traffic, limit):
                if rows.first is None:
                    yield from named(self.model, [(rows.name, rows.values)], waiting)
                else:
                    yield from hf_names.experts_from(self.model, rows.name, rows.values, rows.first)

    def shards(self, traffic: Traffic) -> Generator[full_gather.Gathered, None, None]:
        """Everything in the shards of all ranks."""
        limit = full_gather.gather_bytes(self.settings.memory_bytes, self.meshes.topology.fsdp)
        return self._gathered(limit, traffic, lambda name: True)

    def _gathered(
        self, limit: int, traffic: Traffic, may_split: Callable[[str], bool]
    ) -> Generator[full_gather.Gathered, None, None]:
        return full_gather.gathered(self.model, self.meshes, self.layers, limit, self.dtypes, traffic, may_split)

    def _has_names_by_expert(self, name: str) -> bool:
        """Whether a checkpoint has a parameter expert by expert; warns, once, of a large one that it has whole."""
        if name not in self._by_expert:
            param = self.model.get_parameter(name)
            self._by_expert[name] = by_expert = hf_names.is_by_expert(self.model, name, param.shape)
            if not by_expert and list(self._by_expert.values()).count(False) == 1 and dist.get_rank() == 0:
                logger.warning(
                    "epfsdp2: the full stream holds %s whole, %d bytes, which is more than engine.sync_megabytes=%d "
                    "has room for: checkpoints of %s have it in one tensor",
                    name,
                    param.numel() * self.dtypes[name].itemsize,
                    self.settings.memory_bytes >> 20,
                    self.family,
                )
        return self._by_expert[name]

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers, sharded, by name."""
        # Which buffers are persistent takes longer to find out than to send a small layer.
        return {**dict(self.model.named_parameters()), **{name: self.model.get_buffer(name) for name in self._buffers}}

    def values(self) -> LocalValues:
        """What this rank holds of each, as it is sent: with adapters merged; collective."""
        return local_values(self.model, self.meshes.dense.device_type)

    def tensors(self) -> list[Tensor]:
        """What there is to hand over, as the planner takes it."""
        return sharded_tensors(self.model, {name: dtype.itemsize for name, dtype in self.dtypes.items()})

    def stream(self, kind: Stream, rollout: Rollout, worker: int, is_quantised: bool = False) -> "WorkerStream":
        """The weights of one sync for the worker with this index in its replica."""
        self._begun += 1
        return WorkerStream(self, self._begun, kind, rollout, worker, is_quantised)

    def needs_of(self, kind: Stream, rollout: Rollout, worker: int) -> Callable[[Tensor], list[Need]]:
        """Tells what a worker takes of a tensor; remembers it by name, since every sync asks."""
        known = self._needs.setdefault((kind, rollout, worker), {})

        def of(tensor: Tensor) -> list[Need]:
            if tensor.name not in known:
                known[tensor.name] = needs(tensor, rollout, worker, self.heads, kind)
            return known[tensor.name]

        return of

    def places_of(self, kind: Stream, rollout: Rollout, worker: int) -> Callable[[Tensor, IndexRange], list[Place]]:
        """Tells what of a box of a tensor goes where in a worker; remembers that too."""
        needs_of = self.needs_of(kind, rollout, worker)
        known = self._places.setdefault((kind, rollout, worker), {})

        def of(tensor: Tensor, box: IndexRange) -> list[Place]:
            if (tensor.name, box) not in known:
                known[tensor.name, box] = places(box, needs_of(tensor))
            return known[tensor.name, box]

        return of

    def exchange(self, kind: Stream, rollout: Rollout, worker: int) -> Exchange:
        """The exchange that feeds ``worker`` of each replica; collective only when it is run."""
        key = (kind, rollout, worker)
        if key not in self._exchanges:
            world = dist.get_world_size()

            def needs_of(tensor: Tensor, index: int) -> list[Need]:
                return needs(tensor, rollout, index % rollout.workers, self.heads, kind)

            plan = make_plan(
                self.tensors(),
                self.layers,
                self.meshes.topology,
                Targets(world),
                needs_of,
                round_bytes(self.settings.memory_bytes),
            )
            device = self.meshes.dense.device_type
            self._exchanges[key] = Exchange(plan, self.needs_of(*key), dist.get_rank(), device)
        return self._exchanges[key]


class WorkerStream:
    """The weights of one sync for one worker.

    Args:
        is_quantised: vLLM quantises what it is handed, in verl's own loader. That takes matrices alone, so no stack of
            experts, and no checksums.

    Attributes:
        kind: what is handed over.
        is_verified: whether its checksums are to come after the tensors.
        traffic: what it has moved so far.
    """

    def __init__(
        self,
        sync: RolloutSync,
        number: int,
        kind: Stream,
        rollout: Rollout,
        worker: int,
        is_quantised: bool = False,
    ):
        self._sync, self._number, self.kind, self._rollout, self._worker = sync, number, kind, rollout, worker
        self._is_quantised = is_quantised
        self.is_verified = not is_quantised and is_verified(number, sync.settings.verified)
        self._places = sync.places_of(kind, rollout, worker)
        self.traffic = Traffic()

    def tensors(self, landing: Landing | None = None) -> Generator[tuple[str, torch.Tensor]]:
        """What the worker takes, under names that it knows; collective.

        Args:
            landing: where slices that come from other ranks may arrive.
        """
        if self.kind == "full":
            return self._sync.full(self.traffic, as_checkpoint=self._is_quantised)
        if self.kind == "expert_local":
            return self._expert_local()
        return self._slices_of_gathers() if self._rollout.keeps_all else self._slices(landing)

    def _expert_local(self) -> Generator[tuple[str, torch.Tensor]]:
        whole = self._exchange.assembled(self._sync.state(), self._sync.dtypes, self.traffic, self._sync.values())
        with contextlib.closing(whole):
            for name, need, values in whole:
                # vLLM would take a part of a stack for its first experts.
                first = need.box.low[0] if need.box.low else 0
                yield from hf_names.experts_from(self._sync.model, name, values, first)

    def _slices(self, landing: Landing | None) -> Generator[tuple[str, torch.Tensor]]:
        arriving = self._exchange.run(self._sync.state(), self._sync.dtypes, self.traffic, self._sync.values(), landing)
        with contextlib.closing(arriving):
            for arrival in arriving:
                dtype = self._sync.dtypes[arrival.tensor.name]
                for name, inside in self._places(arrival.tensor, arrival.box):
                    yield name, self._as_sent(arrival.values[inside], dtype)

    def _as_sent(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Values that this rank has itself and stores in another dtype, or elsewhere than it sends from."""
        device = torch.device(self._sync.meshes.dense.device_type)
        if values.dtype == dtype and values.device.type == device.type:
            return values
        # A GPU makes casts faster than anything else here, and its transport may hand memory over as it is.
        return CastOnCopy(values, dtype) if device.type == "cpu" else values.to(device, dtype)

    def _slices_of_gathers(self) -> Generator[tuple[str, torch.Tensor]]:
        """For a worker that keeps everything. Gathers cross a node's border once, rounds would for each rank in it."""
        arriving = self._sync.shards(self.traffic)
        with contextlib.closing(arriving):
            for whole in arriving:
                tensor = Tensor(whole.name, tuple(whole.shape), self._sync.dtypes[whole.name].itemsize)
                for box, values in whole.shards:
                    for name, inside in self._places(tensor, box):
                        yield name, values[inside]

    @property
    def _exchange(self) -> Exchange:
        return self._sync.exchange(self.kind, self._rollout, self._worker)

    def agree(self, failure: Exception | None) -> None:
        """Before anything is sent, have all ranks know that all plans are one plan, and what failed; collective.

        Args:
            failure: of this rank.

        Raises:
            WeightSyncError: on all ranks alike.
        """
        digest = ""
        try:
            plan = self._exchange.plan
            digest = plan.digest() if plan.rounds else ""
        except Exception as error:
            failure = failure or error
        try:
            check_agreement({"plan": {"digest": digest}}, device=self._sync.meshes.dense.device_type, failure=failure)
        except Exception as error:
            raise WeightSyncError(str(error)) from error

    def layouts(self) -> list[dict[str, str]]:
        """What each worker of the replica keeps, as this engine plans it (``layout/layout_check.py``)."""
        return layouts(self._sync.tensors(), self._rollout, self._sync.heads)

    def least(self) -> int:
        """Bytes that this rank can't do without: what it hands over but does not have itself."""
        if self.kind != "full":
            plan = self._exchange.plan
            return plan.received.get(dist.get_rank(), 0)
        state = dict(weights(self._sync.model))
        missing = (
            (p.numel() - local_tensor(p).numel()) * self._sync.dtypes[name].itemsize for name, p in state.items()
        )
        return sum(missing)

    def report(self, handover: Handover) -> SyncReport:
        """What there is to say at its end."""
        report = SyncReport(self._number, self.kind, self.traffic, self.least(), handover)
        self._sync.last_report = report
        return report


class RolloutWeights:
    """The weights of one sync. Iterating is collective, and so is what the methods give; use one of them."""

    def __init__(self, sync: RolloutSync):
        self._sync = sync

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._sync.full()

    @property
    def sync(self) -> RolloutSync:
        """The engine's side, for a road of another kind."""
        return self._sync

    def for_rollout(self, config: Any, worker: int) -> WorkerStream:
        """What the worker with this index in its replica takes; ``config`` is verl's rollout config.

        Raises:
            SettingError: if the rollout can't take the stream that was asked for by its name.
        """
        return self._sync.stream(self._sync.choose(config), rollout_of(config), worker, bool(quantisation(config)))

    def for_worker(self, kind: Stream, rollout: Rollout, worker: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The same for a stream that is chosen already."""
        return self._sync.stream(kind, rollout, worker).tensors()
