"""The weights that an engine sends to its rollout: full tensors, or the parameters of each worker.

Iterating ``RolloutWeights`` yields full tensors, which every backend of verl accepts. An adapter that knows its worker
calls ``for_rollout`` first, which chooses the mode.
"""

import contextlib
import itertools
import logging
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..engine.lora.adapters import A, B, lora_of
from ..engine.lora.frozen_base import SentBase
from ..engine.lora.merge import AdapterUse, local_values, weights
from ..engine.lora.rollout_names import RolloutNames
from ..engine.model import hf_names
from ..engine.model.layers import is_mtp
from ..engine.quantise.schemes import scheme_of
from ..engine.quantise.shards import QuantisedShards
from ..engine.topology.dtensor import local_tensor, persistent_buffers, shard_steps
from ..engine.topology.mesh import Meshes
from ..engine.topology.rank_consistency import check_agreement
from .layout.rules import whole_slice
from .layout.specs import Heads, Rollout, SyncMode, TargetSlice, TensorSpec
from .plan.transfer_plan import Targets, make_transfer_plan, round_bytes
from .sent_tensors import SCALES, SentModel, tensor_specs
from .servers import choose_mode, is_quantised, server_named, server_of, untested
from .transport.checksums import has_checksums
from .transport.exchange import Exchange, Received, Values
from .transport.report import SyncReport, Traffic, TransferStats
from .transport.watched_sockets import WeightSyncError

__all__ = ["RolloutSync", "RolloutWeights", "SyncSettings", "narrower"]

logger = logging.getLogger("epfsdp2")


@dataclass(frozen=True)
class SyncSettings:
    """The user's settings of the weight sync."""

    requested: str  # ``engine.rollout_sync``
    memory_bytes: int  # bound of a rank's buffers
    verify_syncs: int = 0  # number of first syncs with checksums; -1 for all
    server: str = ""  # verl's name; decides the names of full tensors
    drafts: bool = False  # whether the rollout drafts with the model's multi-token prediction layers


class RolloutSync:
    """Exports a sharded model's weights, sync after sync; keeps the plan of each kind of sync.

    Args:
        layers: FQNs of the model's layers.
        dtypes: by name, a parameter's dtype in the forward (``wrap_plan.compute_dtypes``). A parameter is sent in the
            narrower of this and its stored dtype.
    """

    def __init__(
        self, model: Any, meshes: Meshes, layers: list[str], dtypes: Mapping[str, torch.dtype], settings: SyncSettings
    ):
        self.model, self.meshes, self.layers, self.settings = model, meshes, layers, settings
        # Cached, because finding buffers takes longer than sending a small layer.
        self._buffers = {name: buffer.dtype for name, buffer in persistent_buffers(model).items()}
        self.dtypes = {name: narrower(p.dtype, dtypes.get(name)) for name, p in model.named_parameters()}
        self.dtypes |= self._buffers
        self.heads, self._server = Heads.of(model.config), server_named(settings.server)
        self.device = meshes.dense.device_type
        self.base = SentBase(model)  # the weights that the rollout has below its adapters
        self.last_report: SyncReport | None = None  # of the last sync that ended
        self._exchanges: dict[object, Exchange] = {}
        self._adapter_names: RolloutNames | None = None
        self._last_warning = ""
        self.is_compared = False  # whether the workers have compared their layout with the plan
        self.other_layout = ""  # what differs in an untested release of the server, which then gets full tensors
        self.numbers = itertools.count(1)  # of syncs

    def weights(self, adapters: AdapterUse = "merged", peft_config: dict[str, Any] | None = None) -> "RolloutWeights":
        """Return the next sync's weights; ``peft_config`` describes adapters to rollout ranks in other processes."""
        return RolloutWeights(self, adapters, peft_config)

    def choose_mode(self, config: Any) -> SyncMode:
        """Choose the sync mode for a rollout; warn once, on rank 0, if ``auto`` falls back to ``full``."""
        mode, reason = choose_mode(self.settings.requested, config, self.heads.family, drafts=self.settings.drafts)
        if self.other_layout:
            mode, reason = "full", self.other_layout
        if reason and reason != self._last_warning and dist.get_rank() == 0:
            logger.warning("epfsdp2: engine.rollout_sync=auto falls back to full: %s", reason)
        self._last_warning = reason
        return mode

    def full(
        self, traffic: Traffic | None = None, *, as_checkpoint: bool = False, adapters: AdapterUse = "merged"
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield all full tensors under names that loaders accept, each in its own memory; collective.

        A stack of experts above the memory bound is yielded expert by expert, if the family's checkpoints store experts
        one by one. With ``as_checkpoint`` all tensors are as checkpoints store them.
        """
        waiting: dict[str, torch.Tensor] = {}
        named = hf_names.as_singles if as_checkpoint else self._server.named
        with contextlib.closing(self.gathered(traffic or Traffic(), adapters)) as tensors:
            for name, _, first, step, values in tensors:
                if step == 1:
                    yield from named(self.model, [(name, values)], waiting)
                else:
                    yield from hf_names.experts_from(self.model, name, values, first, step)

    def adapters(self, traffic: Traffic) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield every adapter in full, under names of vLLM's adapter loader; collective."""
        if self._adapter_names is None:
            lora = lora_of(self.model)
            assert lora is not None, "a model without adapters has none to send"
            self._adapter_names = RolloutNames(self.model, lora, self._server.stacked_adapters)
        halves: dict[str, torch.Tensor] = {}
        with contextlib.closing(self.gathered(traffic, "alone")) as tensors:
            for name, *_, values in tensors:
                weight = name.removesuffix(A).removesuffix(B)
                halves[name] = values
                if weight + A in halves and weight + B in halves:
                    yield from self._adapter_names.tensors(weight, halves.pop(weight + A), halves.pop(weight + B))

    def gathered(self, traffic: Traffic, adapters: AdapterUse) -> Generator[Received, None, None]:
        """Yield full tensors, or rows of them, under the model's names, each in its own memory; collective."""
        exchange = self._full_exchange(adapters == "alone")
        with contextlib.closing(exchange.run(self.values(adapters), traffic)) as tensors:
            for found in tensors:
                with traffic.holding(found.values.nbytes):
                    yield found._replace(values=found.values.clone())

    def values(
        self, adapters: AdapterUse = "merged", rollout: Rollout | None = None, wait: Any = dist.Work.wait
    ) -> Values:
        """Return a function from a tensor's name to this rank's values, quantised as in ``rollout`` (``local_values``).

        ``wait`` waits for a collective.
        """
        # One dict per sync, because traversing the model takes longer than sending a small layer.
        state = {**dict(self.model.named_parameters()), **{name: self.model.get_buffer(name) for name in self._buffers}}
        local = local_values(self.model, self.device, adapters, wait)
        if rollout is None or not rollout.is_quantised:
            return lambda name: local(name, state[name])
        params = {
            n: p for n, p in weights(self.model) if is_quantised(self.heads.family, n) and not is_mtp(self.model, n)
        }
        scheme = scheme_of(rollout.block, rollout.channels)
        # With adapters quantise one weight at a time, so that one gather of its adapter serves scales and values.
        limit = round_bytes(self.settings.memory_bytes) if lora_of(self.model) is None else 0
        quantised = QuantisedShards(params, local, scheme, self.device, limit, wait)

        def of(name: str) -> torch.Tensor:
            weight = name.removesuffix(SCALES)
            return quantised.scales_of(weight) if name.endswith(SCALES) else quantised(name, state[name])

        return of

    def sent_model(self) -> SentModel:
        sizes = {name: dtype.itemsize for name, dtype in self.dtypes.items()}
        tensors = tensor_specs(self.model, sizes, drafts=self.settings.drafts)
        dtypes, layers = tuple(self.dtypes.items()), tuple(self.layers)
        return SentModel(tuple(tensors), dtypes, layers, self.meshes.topology, self.heads)

    def exchange(self, rollout: Rollout) -> Exchange:
        """Return the exchange that sends each rank's worker its parameters, planned once; not collective."""
        if rollout not in self._exchanges:
            targets = Targets.colocated(self.meshes.topology, rollout.workers)
            limit, group = round_bytes(self.settings.memory_bytes), self.meshes.replica_group
            exchange = self.sent_model().exchange(rollout, targets, limit, dist.get_rank(), self.device, group)
            self._exchanges[rollout] = exchange
        return self._exchanges[rollout]

    def _full_exchange(self, of_adapters: bool) -> Exchange:
        """Return the exchange that gathers each tensor whole on every rank."""
        if of_adapters not in self._exchanges:
            limit = round_bytes(self.settings.memory_bytes, in_full=True)
            found = weights(self.model, of_adapters=True) if of_adapters else ()
            halves = [TensorSpec(n, tuple(p.shape), self.dtypes[n].itemsize, shard_steps(p)) for n, p in found]
            specs = halves if of_adapters else self.sent_model().tensors
            large = [tensor for tensor in specs if tensor.nbytes > limit and not of_adapters]
            by_expert = {t.name for t in large if hf_names.is_by_expert(self.model, t.name, torch.Size(t.shape))}
            held = [tensor for tensor in large if tensor.name not in by_expert]
            if held and dist.get_rank() == 0:
                warning = "epfsdp2: engine.rollout_sync=full holds all of %s at once, %d bytes, more than "
                warning += "engine.sync_megabytes=%d allows: checkpoints of %s store it as one tensor"
                megabytes = self.settings.memory_bytes >> 20
                logger.warning(warning, held[0].name, held[0].nbytes, megabytes, self.heads.family)
            topology, dtypes, may_split = self.meshes.topology, self.dtypes.__getitem__, by_expert.__contains__
            targets, group = Targets.colocated(topology, 1), self.meshes.replica_group
            plan = make_transfer_plan(specs, self.layers, topology, targets, _whole, limit, may_split, by_name=True)
            self._exchanges[of_adapters] = Exchange(plan, dist.get_rank(), _whole, dtypes, self.device, group)
        return self._exchanges[of_adapters]


class RolloutWeights:
    """The weights of one sync.

    Attributes:
        has_checksums: whether checksums follow the tensors.
        is_quantised_here: whether weights are sent as values in FP8 or INT8 and scales.
        is_on_trial: whether full tensors are sent if the workers' layout differs from the plan.
    """

    def __init__(self, sync: RolloutSync, adapters: AdapterUse, peft_config: dict[str, Any] | None):
        self.sync, self.adapters, self.peft_config = sync, adapters, peft_config
        self.mode: SyncMode | Literal["adapters"] = "adapters" if adapters == "alone" else "full"
        self.has_checksums = self.is_quantised_here = self.is_on_trial = False
        self.traffic = Traffic()
        self._rollout, self._number, self._as_checkpoint = Rollout(), 0, False
        self._config, self._worker = None, 0

    def stages(self, config: Any, worker: int) -> Iterator[tuple["RolloutWeights", dict[str, Any]]]:
        """Yield the weights to load one after the other, with arguments of vLLM's worker: here one stage."""
        yield self.for_rollout(config, worker), {}

    def for_worker(self, mode: SyncMode, rollout: Rollout, is_quantised: bool = False) -> "RolloutWeights":
        """Choose a mode, for a rollout whose worker quantises full tensors itself if ``is_quantised``."""
        if self.adapters == "left out":
            self.sync.base.record()
        if self.adapters != "alone":
            self.mode, self._rollout = mode, rollout
        self._number = self._number or next(self.sync.numbers)
        # verl's own loader quantises full tensors, and accepts neither stacks of experts nor checksums.
        self._as_checkpoint = is_quantised and self.mode == "full"
        is_verified = has_checksums(self._number, self.sync.settings.verify_syncs)
        self.has_checksums = is_verified and not self._as_checkpoint
        self.is_quantised_here = rollout.is_quantised and self.mode == "sliced"
        if self.adapters == "alone":
            self.sync.base.check(self.has_checksums)
        return self

    def for_rollout(self, config: Any, worker: int) -> "RolloutWeights":
        """Choose the mode for the worker beside this rank by verl's rollout config.

        Raises ``SettingError`` if the rollout does not support the mode of ``engine.rollout_sync``. Raises
        ``BaseChangedError`` if adapters are sent alone after a change of the weights below them.
        """
        if self.adapters == "alone":
            return self.for_worker("full", Rollout())
        mode, server = self.sync.choose_mode(config), server_of(config)
        self.for_worker(mode, server.rollout_of(config), bool(server.quantisation_settings(config)))
        self._config, self._worker = config, worker
        is_new = mode == "sliced" and not self.sync.is_compared and bool(untested(config))
        self.has_checksums |= is_new
        self.is_on_trial = is_new and self.sync.settings.requested == "auto"
        return self

    def tensors(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the tensors or parameters under names of the worker's loader; collective."""
        if self.mode == "adapters":
            yield from self.sync.adapters(self.traffic)
        elif self.mode == "full":
            yield from self.sync.full(self.traffic, as_checkpoint=self._as_checkpoint, adapters=self.adapters)
        else:
            yield from self._exchange.named(self.sync.values(self.adapters, self._rollout), self.traffic)

    __iter__ = tensors

    @property
    def _exchange(self) -> Exchange:
        return self.sync.exchange(self._rollout)

    def check_plans(self, failure: Exception | None) -> None:
        """Raise ``WeightSyncError`` on all ranks if their plans differ or one has a ``failure``; collective.

        Weights that are on trial are sent as full tensors instead, in this sync and later ones.
        """
        digest = ""
        try:
            digest = self._exchange.plan.digest()
        except Exception as error:
            failure = failure or error
        try:
            check_agreement({"plan": {"digest": digest}}, device=self.sync.device, failure=failure)
        except Exception as error:
            if not self.is_on_trial:
                raise WeightSyncError(str(error)) from error
            self.sync.other_layout = " ".join(f"{untested(self._config)}: {error}".split())
            self.for_rollout(self._config, self._worker)
            server_of(self._config).check_mode(self._config, "full", self.sync.other_layout, "naive")
        self.sync.is_compared = True

    def planned_layouts(self) -> list[dict[str, str]]:
        """Return the planned layout of each worker of the replica (``layout/layout_check.py``)."""
        return self.sync.sent_model().planned_layouts(self._rollout)

    def min_received_bytes(self) -> int:
        """Return the bytes of the worker's tensors that this rank does not hold."""
        if self.mode != "sliced":
            model = self.sync.model
            found = weights(model, of_adapters=self.mode == "adapters")
            found = ((n, p) for n, p in found if self.sync.settings.drafts or not is_mtp(model, n))
            missing = ((name, p.numel() - local_tensor(p).numel()) for name, p in found)
            return sum(count * self.sync.dtypes[name].itemsize for name, count in missing)
        plan, kind = self._exchange.plan, self._exchange.member.kind
        assert kind is not None
        return int(plan.needed[kind] - plan.sent[self.sync.meshes.fsdp_rank, kind])

    def report(self, transfer: TransferStats) -> SyncReport:
        """Return this sync's report and keep it as ``RolloutSync.last_report``."""
        least = self.min_received_bytes()
        self.sync.last_report = SyncReport(self._number, self.mode, self.traffic, least, transfer)
        return self.sync.last_report


def _whole(tensor: TensorSpec, kind: int) -> list[TargetSlice]:
    return [whole_slice(tensor)]


def narrower(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the narrower dtype, ``stored`` if both are equally wide or ``wanted`` is None."""
    return wanted if wanted is not None and wanted.itemsize < stored.itemsize else stored
