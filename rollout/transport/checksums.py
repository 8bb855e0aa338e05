"""Verifies a weight sync by one checksum per tensor, computed on both sides.

The last tensor of a sync has the sender's checksums, in the order of the tensors before it.
"""

import contextlib
from collections.abc import Generator, Iterable

import torch

__all__ = ["CHECKSUMS", "ReceivedChecksums", "PlacedChecksums", "checksum", "has_checksums", "with_checksums"]

CHECKSUMS = "__epfsdp2_checksums__"
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def has_checksums(sync: int, verify_syncs: int) -> bool:
    """Whether a sync, numbered from 1, is one of the first ``verify_syncs``, or this is -1."""
    return verify_syncs < 0 or sync <= verify_syncs


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor's bits as an int64 scalar on its device, without synchronizing.

    Changing any single value changes it, and so does swapping two rows.
    """
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    # Sum the widest words that divide a row, because 2-byte words take five times as long.
    row = tensor.element_size() * (tensor.shape[-1] if tensor.dim() else 1)
    width = next(width for width in _WORDS if row % width == 0)
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % width:
        flat = flat.clone()  # because buckets of verl align tensors to their element size only
    words = flat.view(_WORDS[width])
    rows = words.view(-1, row // width if tensor.dim() > 1 else 1).sum(1, dtype=torch.int64)
    return (rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum()  # modulo 2 ** 64


def with_checksums(tensors: Generator[tuple[str, torch.Tensor]]) -> Generator[tuple[str, torch.Tensor]]:
    """Yield the tensors, then one tensor of their checksums; close ``tensors``."""
    sums = []
    with contextlib.closing(tensors):
        for name, tensor in tensors:
            sums.append(checksum(tensor))
            yield name, tensor
    if sums:
        yield CHECKSUMS, torch.stack([value.to(sums[-1].device) for value in sums])


class ReceivedChecksums:
    """Compares checksums of received tensors with the sender's; without ``check`` only drops the sender's."""

    def __init__(self, check: bool):
        self._check = check
        self._received: list[tuple[str, torch.Tensor]] = []
        self._sent: list[int] | None = None

    def record(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Record the tensors of a bucket, and return them without the sender's checksums."""
        rest = []
        for name, tensor in tensors:
            if name == CHECKSUMS:
                self._sent = tensor.tolist()
                continue
            if self._check:
                self._received.append((name, checksum(tensor)))
            rest.append((name, tensor))
        return rest

    def difference(self) -> str:
        """Describe the first difference from the sender's checksums; empty if there is none."""
        if not self._check:
            return ""
        if self._sent is None:
            return "the checksums of the tensors were not received"
        if len(self._sent) != len(self._received):
            return f"{len(self._received)} tensors were received of {len(self._sent)} that were sent"
        for sent, (name, received) in zip(self._sent, self._received, strict=True):
            if sent != received.item():
                return f"the received values of {name} differ from those that were sent"
        return ""


class PlacedChecksums:
    """Records checksums of loaded values, and compares them with the parameters after processing."""

    def __init__(self):
        self._placed: dict[str, list[tuple[tuple[slice, ...], torch.Tensor]]] = {}

    def add(self, parameter: str, rows: tuple[slice, ...], values: torch.Tensor) -> None:
        """Record loaded values, in the parameter's dtype."""
        self._placed.setdefault(parameter, []).append((rows, checksum(values)))

    def difference(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
        """Describe the first tensor that differs from its recorded values; empty if there is none."""
        if not self._placed:
            return ""
        for name, tensor in tensors:
            if any(checksum(tensor[rows]) != placed for rows, placed in self._placed.get(name, ())):
                return f"the values of {name} on the worker differ from those that were received"
        return ""
