"""The weights that a trainer rank sends to one vLLM worker in a sync: full tensors, slices, or the worker's experts."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

from ..engine.lora.merge import AdapterUse
from ..engine.model import hf_names
from ..engine.topology.rank_consistency import check_agreement
from .layout.layout_check import planned_layouts
from .layout.vllm_layout import Rollout, SyncMode, TensorSpec
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
        is_quantised: vLLM quantises the weights in verl's own loader, which accepts neither stacks of experts nor
            checksums.
        adapters: whether adapters are merged into the weights.

    Attributes:
        mode: what is sent: full tensors, slices, or the worker's own experts.
        has_checksums: whether the tensors are to be followed by their checksums.
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
        self.has_checksums = not is_quantised and has_checksums(number, sync.settings.verify_syncs)
        self._indices = sync.indices_of(mode, rollout, worker)
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
        blocks = self._exchange.run(sync.state(), sync.dtypes, self.traffic, values, receive_buffers)
        with contextlib.closing(blocks):
            for found in blocks:
                dtype = sync.dtypes[found.tensor.name]
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
        gathered = self._sync.shards(self.traffic, self._adapters)
        with contextlib.closing(gathered):
            for found in gathered:
                tensor = TensorSpec(found.name, tuple(found.shape), self._sync.dtypes[found.name].itemsize)
                for block, values in found.shards:
                    for name, inside in self._indices(tensor, block):
                        yield name, values[inside]

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
        return planned_layouts(self._sync.tensor_specs(), self._rollout, self._sync.heads)

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
