"""The adapters that a trainer rank sends in a sync to a vLLM that computes with them; the base was sent before."""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import torch

from ..engine.errors import listed
from ..engine.lora.adapters import A, B
from ..engine.lora.frozen_base import base_checksums, difference
from ..engine.lora.rollout_names import RolloutNames
from .transport import full_gather
from .transport.checksums import has_checksums
from .transport.exchange import ReceiveBuffers
from .transport.report import SyncReport, Traffic, TransferStats

__all__ = ["BaseChangedError", "RolloutAdapters", "SentBase"]


class BaseChangedError(RuntimeError):
    """The weights that a rollout was sent once, below its adapters, are others in the trainer now."""


class SentBase:
    """The frozen weights as the rollout has them, by their checksums.

    Args:
        model: sharded, with adapters.
    """

    def __init__(self, model: Any):
        self._model = model
        self._sent: dict[str, list[Any]] | None = None
        self._may_differ = False

    def record(self) -> None:
        """Remember the weights that are about to be sent; collective."""
        self._sent, self._may_differ = base_checksums(self._model), False

    def loaded(self) -> None:
        """Note that a checkpoint was loaded, which may have had other weights."""
        self._may_differ = True

    def check(self, wanted: bool) -> None:
        """Compare the weights with those that were sent, where that is wanted or a checkpoint was loaded; collective.

        Raises:
            BaseChangedError: they differ.
        """
        if self._sent is None:  # vLLM has read them from the model's checkpoint
            self.record()
        if not wanted and not self._may_differ:
            return
        changed = difference(self._sent or {}, base_checksums(self._model))
        if changed:
            raise BaseChangedError(
                f"the frozen weights have changed after they were sent to the rollout: {listed(changed)}. It is sent "
                "adapters alone; actor_rollout_ref.model.lora.merge=True sends the weights in every sync."
            )
        self._may_differ = False


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
        """Return what to send to a worker; see ``RolloutWeights.for_rollout``. verl may send the base before it.

        Raises:
            BaseChangedError: the weights are no longer those that the rollout has.
        """
        self._number = self._sync.next_number()
        self.has_checksums = has_checksums(self._number, self._sync.settings.verify_syncs)
        self._sync.base.check(self.has_checksums)
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
