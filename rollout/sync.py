"""The weights that a trainer rank sends in a sync: full tensors, or the slices that one vLLM worker keeps.

Iterating ``RolloutWeights`` yields full tensors, which every backend of verl accepts. An adapter that knows its worker
calls ``RolloutWeights.for_rollout`` instead.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..engine.lora.adapters import lora_of
from ..engine.lora.merge import AdapterUse, LocalValues, adapter_weights, local_values, weights
from ..engine.lora.rollout_names import RolloutNames
from ..engine.model import hf_names
from ..engine.topology.dtensor import local_tensor, persistent_buffers
from ..engine.topology.index_ranges import IndexRange
from ..engine.topology.mesh import Meshes
from .adapter_sync import RolloutAdapters, SentBase
from .layout.slice_names import NamedIndex, named_indices
from .layout.specs import Heads, Rollout, SyncMode, TargetSlice, TensorSpec
from .layout.trainer_tensors import sharded_tensor_specs
from .layout.transfer_plan import Targets, make_transfer_plan, round_bytes
from .quantise.schemes import scheme_of
from .quantise.shards import QuantisedShards
from .servers import choose_mode, is_quantised, quantisation_settings, rollout_of, server_named, target_slices
from .transport import full_gather
from .transport.exchange import Exchange
from .transport.report import SyncReport, Traffic
from .worker_weights import WorkerWeights

__all__ = ["RolloutSync", "RolloutWeights", "SyncSettings"]

logger = logging.getLogger("epfsdp2")


@dataclass(frozen=True)
class SyncSettings:
    """The user's settings of the weight sync.

    Args:
        requested: ``engine.rollout_sync``.
        memory_bytes: bound of a rank's buffers.
        verify_syncs: number of first syncs that carry checksums; -1 for all.
        server: verl's name of the rollout's server, whose loader decides under which names full tensors are sent.
    """

    requested: str
    memory_bytes: int
    verify_syncs: int = 0
    server: str = ""


class RolloutSync:
    """Exports an engine's weights, sync after sync; keeps the transfer plan of each rollout layout.

    Args:
        model: sharded.
        layers: FQNs of its layers.
        dtypes: the dtype in which each parameter is sent, where it is narrower than the stored one
            (``engine/fsdp/wrap_plan.py``, ``compute_dtypes``).
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
        stored = {name: p.dtype for name, p in model.named_parameters()}
        self.dtypes = {name: full_gather.narrower(dtype, dtypes.get(name)) for name, dtype in stored.items()}
        buffers = persistent_buffers(model)
        self.dtypes |= {name: buffer.dtype for name, buffer in buffers.items()}
        self._buffers = list(buffers)
        self.heads, self._server = Heads.of(model.config), server_named(settings.server)
        self._quantised = [name for name in stored if is_quantised(self.heads.family, name)]
        self._exchanges: dict[tuple[SyncMode, Rollout, int], Exchange] = {}
        self._slices: dict[tuple[SyncMode, Rollout, int], dict[str, list[TargetSlice]]] = {}
        self._indices: dict[tuple[SyncMode, Rollout, int], dict[tuple[str, IndexRange], list[NamedIndex]]] = {}
        self._by_expert: dict[str, bool] = {}
        self._last_warning = ""
        self._adapter_names: RolloutNames | None = None
        self.base = SentBase(model)
        self._sync_count = 0
        self.last_report: SyncReport | None = None

    def weights(self, adapters: AdapterUse = "merged", peft_config: dict[str, Any] | None = None) -> "RolloutWeights":
        """Return the weights of the next sync, with adapters merged or left out.

        Args:
            peft_config: of adapters that rollout ranks in other processes are sent apart from the weights.
        """
        return RolloutWeights(self, adapters, peft_config)

    def adapters(self) -> RolloutAdapters:
        """Return the adapters of the next sync, for a rollout that has the weights without them."""
        if self._adapter_names is None:
            lora = lora_of(self.model)
            assert lora is not None, "a model without adapters has none to send"
            self._adapter_names = RolloutNames(self.model, lora, self._server.stacked_adapters)
        return RolloutAdapters(self, self._adapter_names)

    def next_number(self) -> int:
        """Count a sync; return its number, from 1."""
        self._sync_count += 1
        return self._sync_count

    @property
    def family(self) -> str:
        """The ``model_type`` of the model."""
        return self.model.config.model_type

    def choose_mode(self, config: Any) -> SyncMode:
        """Choose the sync mode for a rollout; warns once, on rank 0, why ``auto`` fell back to ``full``."""
        mode, reason = choose_mode(self.settings.requested, config, self.family)
        if reason and reason != self._last_warning and dist.get_rank() == 0:
            logger.warning("epfsdp2: engine.rollout_sync=auto falls back to full: %s", reason)
        self._last_warning = reason
        return mode

    def full(
        self, traffic: Traffic | None = None, *, as_checkpoint: bool = False, adapters: AdapterUse = "merged"
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Yield all tensors in full under names that loaders accept; collective.

        A stack of experts that exceeds the memory bound is yielded expert by expert where checkpoints have it so.

        Args:
            as_checkpoint: use the names of checkpoints only; those of most families have one matrix per expert.
        """
        traffic = traffic or Traffic()
        limit, named = self.gather_limit, hf_names.as_singles if as_checkpoint else self._server.named
        gathered = self.gather(limit, traffic, self._is_stored_by_expert, adapters)
        waiting: dict[str, torch.Tensor] = {}
        with contextlib.closing(gathered):
            for rows in full_gather.assemble(gathered, traffic, limit):
                if rows.first is None:
                    one = [(rows.name, rows.values)]
                    yield from named(self.model, one, waiting)
                else:
                    yield from hf_names.experts_from(self.model, rows.name, rows.values, rows.first)

    def shards(
        self, traffic: Traffic, adapters: AdapterUse = "merged", quantised: QuantisedShards | None = None
    ) -> Generator[full_gather.GatheredTensor, None, None]:
        """Yield all tensors as the shards of all ranks, without assembling them; collective."""
        limit = full_gather.gather_bytes(self.settings.memory_bytes, self.meshes.topology.fsdp)
        return self.gather(limit, traffic, lambda name: True, adapters, quantised)

    def gather(
        self,
        limit: int,
        traffic: Traffic,
        may_split: Callable[[str], bool] = lambda name: False,
        adapters: AdapterUse = "merged",
        quantised: QuantisedShards | None = None,
    ) -> Generator[full_gather.GatheredTensor, None, None]:
        """Gather the weights or the adapters, in the dtypes in which they are sent; see ``full_gather.gather``."""
        dtypes = self.dtypes if quantised is None else self._with(quantised.scheme.dtype)
        return full_gather.gather(
            self.model, self.meshes, self.layers, limit, dtypes, traffic, may_split, adapters, quantised
        )

    @property
    def gather_limit(self) -> int:
        """Bytes of one gather whose tensors are assembled, within the memory bound."""
        return full_gather.gather_bytes(self.settings.memory_bytes, self.meshes.topology.fsdp, is_assembled=True)

    def _is_stored_by_expert(self, name: str) -> bool:
        """Tell whether checkpoints store a stack expert by expert; warns once of one that has to be held in full."""
        if name not in self._by_expert:
            param = self.model.get_parameter(name)
            self._by_expert[name] = by_expert = hf_names.is_by_expert(self.model, name, param.shape)
            if not by_expert and list(self._by_expert.values()).count(False) == 1 and dist.get_rank() == 0:
                logger.warning(
                    "epfsdp2: engine.rollout_sync=full holds all of %s at once, %d bytes, more than "
                    "engine.sync_megabytes=%d allows: checkpoints of %s store it as one tensor",
                    name,
                    param.numel() * self.dtypes[name].itemsize,
                    self.settings.memory_bytes >> 20,
                    self.family,
                )
        return self._by_expert[name]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the sharded parameters and the persistent buffers by name."""
        # Names of persistent buffers are cached: finding them takes longer than sending a small layer.
        return {**dict(self.model.named_parameters()), **{name: self.model.get_buffer(name) for name in self._buffers}}

    def values(
        self, adapters: AdapterUse = "merged", wait: Callable[[dist.Work], object] = dist.Work.wait
    ) -> LocalValues:
        """Return a function from a parameter to this rank's values to send; see ``local_values``."""
        return local_values(self.model, self.meshes.dense.device_type, adapters, wait)

    def dtypes_for(self, rollout: Rollout) -> Mapping[str, torch.dtype]:
        """Return the dtype in which each tensor is sent in slices to such a rollout."""
        return self._with(scheme_of(rollout.block, rollout.channels).dtype) if rollout.is_quantised else self.dtypes

    def _with(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {**self.dtypes, **dict.fromkeys(self._quantised, dtype)}

    def quantised(self, rollout: Rollout, values: LocalValues) -> QuantisedShards:
        """Return this rank's values, quantised as such a rollout holds them; see ``QuantisedShards``."""
        params = {name: self.model.get_parameter(name) for name in self._quantised}
        scheme = scheme_of(rollout.block, rollout.channels)
        # One weight at a time with adapters: then one gather of its adapter serves its scales and its values.
        limit = round_bytes(self.settings.memory_bytes) if lora_of(self.model) is None else 0
        return QuantisedShards(params, values, scheme, self.meshes.dense.device_type, limit)

    def missing_bytes(self, adapters: bool = False) -> int:
        """Return the bytes, as they are sent, of all weights or adapters that this rank does not hold."""
        params = (adapter_weights if adapters else weights)(self.model)
        return sum((p.numel() - local_tensor(p).numel()) * self.dtypes[name].itemsize for name, p in params)

    def tensor_specs(self, rollout: Rollout | None = None) -> list[TensorSpec]:
        """Describe the tensors to send in slices to such a rollout, for the plan; one in bfloat16 by default."""
        dtypes = self.dtypes if rollout is None else self.dtypes_for(rollout)
        return sharded_tensor_specs(self.model, {name: dtype.itemsize for name, dtype in dtypes.items()})

    def worker_weights(
        self,
        mode: SyncMode,
        rollout: Rollout,
        worker: int,
        is_quantised: bool = False,
        adapters: AdapterUse = "merged",
    ) -> WorkerWeights:
        """Return the weights of the next sync for the worker with this index in its replica."""
        return WorkerWeights(self, self.next_number(), mode, rollout, worker, is_quantised, adapters)

    def slices_of(self, mode: SyncMode, rollout: Rollout, worker: int) -> Callable[[TensorSpec], list[TargetSlice]]:
        """Return a function from a tensor to the slices that a worker keeps, cached by name across syncs."""
        known = self._slices.setdefault((mode, rollout, worker), {})

        def of(tensor: TensorSpec) -> list[TargetSlice]:
            if tensor.name not in known:
                known[tensor.name] = target_slices(tensor, rollout, worker, self.heads, mode)
            return known[tensor.name]

        return of

    def indices_of(
        self, mode: SyncMode, rollout: Rollout, worker: int
    ) -> Callable[[TensorSpec, IndexRange], list[NamedIndex]]:
        """Return a function from a block of a tensor to its ``named_indices`` for a worker, cached across syncs."""
        slices_of = self.slices_of(mode, rollout, worker)
        known = self._indices.setdefault((mode, rollout, worker), {})

        def of(tensor: TensorSpec, block: IndexRange) -> list[NamedIndex]:
            if (tensor.name, block) not in known:
                known[tensor.name, block] = named_indices(block, slices_of(tensor))
            return known[tensor.name, block]

        return of

    def exchange(self, mode: SyncMode, rollout: Rollout, worker: int) -> Exchange:
        """Return the exchange for ``worker`` of each replica, made once; running it is collective, this call is not."""
        key = (mode, rollout, worker)
        if key not in self._exchanges:
            world = dist.get_world_size()

            def slices_of(tensor: TensorSpec, index: int) -> list[TargetSlice]:
                return target_slices(tensor, rollout, index % rollout.workers, self.heads, mode)

            plan = make_transfer_plan(
                self.tensor_specs(rollout),
                self.layers,
                self.meshes.topology,
                Targets(world),
                slices_of,
                round_bytes(self.settings.memory_bytes),
            )
            device = self.meshes.dense.device_type
            self._exchanges[key] = Exchange(plan, self.slices_of(*key), dist.get_rank(), device)
        return self._exchanges[key]


class RolloutWeights:
    """The weights of one sync: iterate it for full tensors, or use ``for_rollout``; both are collective."""

    def __init__(self, sync: RolloutSync, adapters: AdapterUse = "merged", peft_config: dict[str, Any] | None = None):
        self._sync, self.adapters, self.peft_config = sync, adapters, peft_config

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._sync.full(adapters=self.adapters)

    @property
    def sync(self) -> RolloutSync:
        """The engine's exporter, for the checkpoint-engine backend (``remote/remote_sync.py``)."""
        return self._sync

    def for_rollout(self, config: Any, worker: int) -> WorkerWeights:
        """Return the weights for the worker with this index in its replica.

        Args:
            config: verl's rollout config.

        Raises:
            SettingError: the rollout does not support the mode that ``engine.rollout_sync`` names.
        """
        if self.adapters == "left out":
            self._sync.base.record()
        is_quantised, mode = bool(quantisation_settings(config)), self._sync.choose_mode(config)
        return self._sync.worker_weights(mode, rollout_of(config), worker, is_quantised, self.adapters)
