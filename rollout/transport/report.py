"""Statistics of one weight sync on one rank."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["TransferStats", "SyncReport", "Traffic"]

_GB = 1e9


@dataclass
class Traffic:
    """Bytes that a rank sent to and received from other ranks; bytes of its buffers now and at their peak."""

    sent: int = 0
    received: int = 0
    held: int = 0
    peak: int = 0

    @contextlib.contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Count buffers that live during the block."""
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        try:
            yield
        finally:
            self.held -= nbytes


@dataclass(frozen=True)
class TransferStats:
    """Amount and seconds of a rank's transfer to its worker."""

    tensors: int
    nbytes: int
    gather_seconds: float  # waiting for trainer ranks
    wire_seconds: float  # filling buckets
    load_seconds: float  # waiting for the worker, which receives and loads


@dataclass(frozen=True)
class SyncReport:
    """One sync as seen by one rank."""

    number: int  # of this engine's syncs, from 1
    mode: str
    traffic: Traffic
    min_received_bytes: int  # bytes of the worker's tensors that this rank does not hold
    transfer: TransferStats

    def __str__(self) -> str:
        h, t = self.transfer, self.traffic
        return (
            f"weight sync {self.number}, {self.mode}: {h.tensors} tensors, {h.nbytes / _GB:.3f} GB in "
            f"{h.gather_seconds + h.wire_seconds + h.load_seconds:.2f} s (gather {h.gather_seconds:.2f}, wire "
            f"{h.wire_seconds:.2f}, load {h.load_seconds:.2f}); received {t.received / _GB:.3f} GB of at least "
            f"{self.min_received_bytes / _GB:.3f}, sent {t.sent / _GB:.3f}, held {t.peak / _GB:.3f} at most"
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics for verl's logger by name."""
        return {
            "sync_gather_seconds": self.transfer.gather_seconds,
            "sync_wire_seconds": self.transfer.wire_seconds,
            "sync_load_seconds": self.transfer.load_seconds,
            "sync_received_gb": self.traffic.received / _GB,
            "sync_least_gb": self.min_received_bytes / _GB,
            "sync_sent_gb": self.traffic.sent / _GB,
            "sync_peak_gb": self.traffic.peak / _GB,
            # 1 if the sync fell back to the slower mode, else 0.
            "sync_full_stream": float(self.mode == "full"),
        }
