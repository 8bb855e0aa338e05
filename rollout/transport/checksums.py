"""Did the values that were handed over arrive? A sum per tensor, computed on both sides.

The sums travel as the last tensor of a sync, in the order of the tensors before it.
"""

import contextlib
from collections.abc import Generator, Iterable, Sequence

import torch

__all__ = ["CHECKSUMS", "Arrivals", "Placements", "checksum", "is_verified", "with_checksums"]

# No checkpoint has such a name.
CHECKSUMS = "__epfsdp2_checksums__"
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def is_verified(sync: int, verified: int) -> bool:
    """Whether a sync, by its number from 1, carries checksums; ``verified`` of them do, -1 for all."""
    return verified < 0 or sync <= verified


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor's bits: an int64 scalar on its device, without waiting for it.

    Any change of a single value changes it, and so do two rows that change places.
    """
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    # The widest words that a row is made of: the sum of 2-byte words takes five times as long.
    row = tensor.element_size() * (tensor.shape[-1] if tensor.dim() else 1)
    width = next(width for width in _WORDS if row % width == 0)
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % width:
        flat = flat.clone()  # buckets align tensors to their elements alone
    words = flat.view(_WORDS[width])
    rows = words.view(-1, row // width if tensor.dim() > 1 else 1).sum(1, dtype=torch.int64)
    return (rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum()  # modulo 2 ** 64


def with_checksums(tensors: Generator[tuple[str, torch.Tensor]]) -> Generator[tuple[str, torch.Tensor]]:
    """The same tensors, and their checksums after them."""
    sums = []
    with contextlib.closing(tensors):
        for name, tensor in tensors:
            sums.append(checksum(tensor))
            yield name, tensor
    if sums:
        yield CHECKSUMS, torch.stack([value.to(sums[-1].device) for value in sums])


class Arrivals:
    """The receiver's side.

    Args:
        check: whether to compare; checksums that come all the same are dropped.
    """

    def __init__(self, check: bool):
        self._check = check
        self._arrived: list[tuple[str, torch.Tensor]] = []
        self._sent: list[int] | None = None

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """What is to be loaded of a bucket."""
        rest = []
        for name, tensor in tensors:
            if name == CHECKSUMS:
                self._sent = tensor.tolist()
                continue
            if self._check:
                self._arrived.append((name, checksum(tensor)))
            rest.append((name, tensor))
        return rest

    def difference(self) -> str:
        """What did not arrive as it was sent; empty if all did."""
        if not self._check:
            return ""
        if self._sent is None:
            return "the checksums of the tensors did not arrive"
        if len(self._sent) != len(self._arrived):
            return f"{len(self._arrived)} tensors arrived of {len(self._sent)} that were sent"
        for sent, (name, arrived) in zip(self._sent, self._arrived, strict=True):
            if sent != arrived.item():
                return f"the values of {name} that arrived are not those that were sent"
        return ""


class Placements:
    """Slices that were placed, to be compared with what is read back later."""

    def __init__(self):
        self._placed: dict[str, list[tuple[tuple[slice, ...], torch.Tensor]]] = {}

    def add(self, parameter: str, corner: Sequence[int], values: torch.Tensor) -> None:
        """Note what goes to ``parameter`` from ``corner`` on, in the parameter's dtype."""
        box = tuple(slice(low, low + size) for low, size in zip(corner, values.shape, strict=True))
        self._placed.setdefault(parameter, []).append((box, _comparable(values)))

    def difference(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
        """What is not there as it was placed; empty if all that ``tensors`` has is."""
        if not self._placed:
            return ""
        for name, tensor in tensors:
            if any(_comparable(tensor[box]) != placed for box, placed in self._placed.get(name, ())):
                return f"the values of {name} in vLLM are not those that arrived"
        return ""


def _comparable(values: torch.Tensor) -> torch.Tensor:
    # Some of what is read back went through arithmetic, which turns -0.0 into 0.0.
    return checksum(values + 0)
