"""What one weight sync moved and held on one rank."""

from dataclasses import dataclass

__all__ = ["Handover", "SyncReport", "Traffic"]

_GB = 1e9


@dataclass
class Traffic:
    """Bytes that went over the wire for this rank; what it had itself is not counted.

    Attributes:
        held: in the buffers of the gather or exchange now; ``peak``, at most at one time.
    """

    sent: int = 0
    received: int = 0
    held: int = 0
    peak: int = 0

    def hold(self, nbytes: int) -> None:
        """Count a buffer that was allocated; ``release`` it when it is let go."""
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def release(self, nbytes: int) -> None:
        self.held -= nbytes


@dataclass(frozen=True)
class Handover:
    """How a rank's weights went to its worker.

    Args:
        tensors, nbytes: that were handed over.
        gather_seconds: until the next tensor was there, in all.
        wire_seconds: to put them into buckets.
        load_seconds: waiting for the worker, which takes and loads them.
        is_stock: verl's own sender filled the buckets, since it is another one than ours was made for (``sender.py``).
    """

    tensors: int
    nbytes: int
    gather_seconds: float
    wire_seconds: float
    load_seconds: float
    is_stock: bool = False


@dataclass(frozen=True)
class SyncReport:
    """One sync as one rank saw it.

    Args:
        number: of this engine's syncs, from 1.
        stream: which was handed over.
        least: bytes that this rank has to receive: all that it hands over but what it has itself.
    """

    number: int
    stream: str
    traffic: Traffic
    least: int
    handover: Handover

    def __str__(self) -> str:
        h, t = self.handover, self.traffic
        return (
            f"weight sync {self.number}, {self.stream}: {h.tensors} tensors, {h.nbytes / _GB:.3f} GB in "
            f"{h.gather_seconds + h.wire_seconds + h.load_seconds:.2f} s (gather {h.gather_seconds:.2f}, wire "
            f"{h.wire_seconds:.2f}, load {h.load_seconds:.2f}); received {t.received / _GB:.3f} GB of at least "
            f"{self.least / _GB:.3f}, sent {t.sent / _GB:.3f}, held {t.peak / _GB:.3f} at most"
        )

    def metrics(self) -> dict[str, float]:
        """Name -> value, for a trainer's logger."""
        return {
            "sync_gather_seconds": self.handover.gather_seconds,
            "sync_wire_seconds": self.handover.wire_seconds,
            "sync_load_seconds": self.handover.load_seconds,
            "sync_received_gb": self.traffic.received / _GB,
            "sync_least_gb": self.least / _GB,
            "sync_sent_gb": self.traffic.sent / _GB,
            "sync_peak_gb": self.traffic.peak / _GB,
            # The two slower ways that a sync may fall back to, 0 or 1.
            "sync_full_stream": float(self.stream == "full"),
            "sync_stock_sender": float(self.handover.is_stock),
        }
