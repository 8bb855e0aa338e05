"""The adapters that a trainer rank sends in a sync to a vLLM that computes with them; the base was sent before."""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import torch

from ..engine.lora.adapters import A, B
from ..engine.lora.rollout_names import RolloutNames
from .transport import full_gather
from .transport.checksums import has_checksums
from .transport.exchange import ReceiveBuffers
from .transport.report import SyncReport, Traffic, TransferStats

__all__ = ["RolloutAdapters"]


class RolloutAdapters:
    """The adapters of one sync, the same for every worker: vLLM's layers cut what they keep of them.

    Args:
        sync: the engine's ``RolloutSync``.
        names: of the model's adapters.

    Attributes:
        mode: what the report calls this kind of sync.
        has_checksums: whether the tensors are to be followed by their checksums.
        traffic: bytes that this sync has moved so far.
    """

    mode = "adapters"

    def __init__(self, sync: Any, names: RolloutNames):
        self._sync, self._names, self._number = sync, names, 0
        self.has_checksums = False
        self.traffic = Traffic()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors()

    def for_rollout(self, config: Any, worker: int) -> "RolloutAdapters":
        """Return what to send to a worker; see ``RolloutWeights.for_rollout``. verl may send the base before it."""
        self._number = self._sync.next_number()
        self.has_checksums = has_checksums(self._number, self._sync.settings.verify_syncs)
        return self

    def tensors(self, receive_buffers: ReceiveBuffers | None = None) -> Generator[tuple[str, torch.Tensor]]:
        """Yield every adapter in full, under names that vLLM's adapter loader takes; collective."""
        limit = self._sync.gather_limit
        gathered = self._sync.gather(limit, self.traffic, adapters="alone")
        halves: dict[str, torch.Tensor] = {}
        with contextlib.closing(gathered):
            for rows in full_gather.assemble(gathered, self.traffic, limit):
                weight = rows.name.removesuffix(A).removesuffix(B)
                halves[rows.name] = rows.values
                if weight + A in halves and weight + B in halves:
                    yield from self._names.tensors(weight, halves.pop(weight + A), halves.pop(weight + B))

    def report(self, transfer: TransferStats) -> SyncReport:
        """Make this sync's report and keep it as ``RolloutSync.last_report``."""
        missing = self._sync.missing_bytes(adapters=True)
        report = SyncReport(self._number, self.mode, self.traffic, missing, transfer)
        self._sync.last_report = report
        return report
