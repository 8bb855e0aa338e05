"""The weights that a trainer rank sends to one vLLM worker in a sync: full tensors, slices, or the worker's experts."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

from ..engine.lora.merge import AdapterUse, LocalValues
from ..engine.model import hf_names
from ..engine.topology.rank_consistency import check_agreement
from .layout.slice_names import slice_name
from .layout.specs import Rollout, SyncMode, TensorSpec
from .quantise.shards import QuantisedShards
from .servers import planned_layouts, slices_of_scales
from .transport.cast import CastOnCopy
from .transport.checksums import has_checksums
from .transport.exchange import Exchange, ReceiveBuffers
from .transport.report import SyncReport, Traffic, TransferStats
from .transport.watched_sockets import WeightSyncError

__all__ = ["WorkerWeights"]


class WorkerWeights:
    """The weights of one sync for one worker.

    Args:
        sync: the engine's ``RolloutSync``.
        is_quantised: whether vLLM holds weights in a quantised form. This rank quantises slices; full tensors are
            quantised by verl's own loader, which accepts neither stacks of experts nor checksums.
        adapters: whether adapters are merged into the weights.

    Attributes:
        mode: what is sent: full tensors, slices, or the worker's own experts.
        has_checksums: whether the tensors are to be followed by their checksums.
        is_quantised_here: whether weights are sent as values in FP8 or INT8 and scales.
        traffic: bytes that this sync has moved so far.
    """

    def __init__(
        self,
        sync: Any,
        number: int,
        mode: SyncMode,
        rollout: Rollout,
        worker: int,
        is_quantised: bool = False,
        adapters: AdapterUse = "merged",
    ):
        self._adapters = adapters
        self._sync, self._number, self.mode, self._rollout, self._worker = sync, number, mode, rollout, worker
        self._is_quantised = is_quantised
        self.has_checksums = not (is_quantised and mode == "full") and has_checksums(number, sync.settings.verify_syncs)
        self._indices = sync.indices_of(mode, rollout, worker)
        self._slices_of = sync.slices_of(mode, rollout, worker)
        self._dtypes = sync.dtypes_for(rollout)
        self.is_quantised_here = rollout.is_quantised and mode == "sliced"
        self.traffic = Traffic()

    def tensors(self, receive_buffers: ReceiveBuffers | None = None) -> Generator[tuple[str, torch.Tensor]]:
        """Yield the tensors or slices for the worker under names that it accepts; collective.

        Args:
            receive_buffers: memory to receive slices from other ranks into, which saves a copy.
        """
        if self.mode == "full":
            return self._sync.full(self.traffic, as_checkpoint=self._is_quantised, adapters=self._adapters)
        if self.mode == "expert_local":
            return self._expert_local()
        return self._slices_from_gather() if self._rollout.keeps_all else self._slices(receive_buffers)

    def _expert_local(self) -> Generator[tuple[str, torch.Tensor]]:
        sync = self._sync
        held = sync.values(self._adapters)
        assembled = self._exchange.assembled(sync.state(), sync.dtypes, self.traffic, held)
        with contextlib.closing(assembled):
            for name, part, values in assembled:
                # Sent expert by expert: vLLM would load a part of a stack as the first experts.
                first = part.block.low[0] if part.block.low else 0
                yield from hf_names.experts_from(self._sync.model, name, values, first)

    def _slices(self, receive_buffers: ReceiveBuffers | None) -> Generator[tuple[str, torch.Tensor]]:
        sync = self._sync
        values = sync.values(self._adapters)
        quantised = self._quantised(values)
        blocks = self._exchange.run(sync.state(), self._dtypes, self.traffic, quantised or values, receive_buffers)
        with contextlib.closing(blocks):
            for found in blocks:
                dtype = self._dtypes[found.tensor.name]
                yield from self._scales(quantised, found.tensor)
                for name, inside in self._indices(found.tensor, found.block):
                    yield name, self._as_sent(found.values[inside], dtype)

    def _as_sent(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cast local values that are stored in another dtype or on another device than they are sent from."""
        device = torch.device(self._sync.meshes.dense.device_type)
        if values.dtype == dtype and values.device.type == device.type:
            return values
        # On a GPU the cast is cheap, and its transport may share the memory without a copy that could cast.
        return CastOnCopy(values, dtype) if device.type == "cpu" else values.to(device, dtype)

    def _slices_from_gather(self) -> Generator[tuple[str, torch.Tensor]]:
        """Yield slices for a worker that keeps the whole model.

        An all-gather sends a shard to each other node once, where an exchange would send it once per rank.
        """
        quantised = self._quantised(self._sync.values(self._adapters))
        gathered = self._sync.shards(self.traffic, self._adapters, quantised)
        with contextlib.closing(gathered):
            for found in gathered:
                tensor = TensorSpec(found.name, tuple(found.shape), self._dtypes[found.name].itemsize)
                yield from self._scales(quantised, tensor)
                for block, values in found.shards:
                    for name, inside in self._indices(tensor, block):
                        yield name, values[inside]

    def _quantised(self, values: LocalValues) -> QuantisedShards | None:
        """Return the values to send to a worker that holds quantised weights, None for any other."""
        if not self.is_quantised_here:
            return None
        quantised = self._sync.quantised(self._rollout, values)
        self.traffic.sent += quantised.nbytes
        self.traffic.received += quantised.nbytes
        return quantised

    def _scales(
        self, quantised: QuantisedShards | None, tensor: TensorSpec
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the scales of what the worker keeps of a tensor, before the first of its blocks."""
        if quantised is None or (scales := quantised.scales.pop(tensor.name, None)) is None:
            return
        family = self._sync.heads.family
        for part in slices_of_scales(tensor, self._slices_of(tensor), self._rollout, family):
            yield slice_name(part.parameter, part.at), scales[part.block.slices]

    @property
    def _exchange(self) -> Exchange:
        return self._sync.exchange(self.mode, self._rollout, self._worker)

    def check_plans(self, failure: Exception | None) -> None:
        """Raise on every rank if plans differ between ranks or any rank has failed; collective, before data is sent.

        Args:
            failure: this rank's failure, if any.

        Raises:
            WeightSyncError: on all ranks.
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

    def planned_layouts(self) -> list[dict[str, str]]:
        """Return the layout that this engine plans for each worker of the replica (``layout/layout_check.py``)."""
        return planned_layouts(self._sync.tensor_specs(self._rollout), self._rollout, self._sync.heads)

    def min_received_bytes(self) -> int:
        """Return the bytes of what this rank sends to its worker that it does not hold itself."""
        if self.mode != "full":
            plan = self._exchange.plan
            return plan.received.get(dist.get_rank(), 0)
        return self._sync.missing_bytes()

    def report(self, transfer: TransferStats) -> SyncReport:
        """Make this sync's report and keep it as ``RolloutSync.last_report``."""
        report = SyncReport(self._number, self.mode, self.traffic, self.min_received_bytes(), transfer)
        self._sync.last_report = report
        return report
