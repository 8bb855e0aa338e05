"""What a trainer rank and its SGLang worker share: memory for slices, and for the worker's answer.

A bucket is one uint8 tensor and a header. Its first bytes are the worker's answer: SGLang returns no exception of a
weight loader, and one that leaves a worker ends the server.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

__all__ = ["ANSWER_BYTES", "Header", "answer_of", "fill", "synchronize", "write_answer"]

ANSWER_BYTES = 4096
_ALIGNMENT = 16


@dataclass
class Header:
    """What a bucket holds; goes as the name of its tensor.

    Args:
        entries: name, shape, dtype and offset of each tensor.
        is_first, is_last: whether a sync begins or ends with this bucket.
        layouts: in the first bucket of an adapter's first sync, the planned layout of each worker
            (``layout/layout_check.py``).
        verify: in the first bucket, whether checksums come last.
    """

    entries: list[tuple[str, list[int], str, int]] = field(default_factory=list)
    is_first: bool = False
    layouts: list[dict[str, str]] | None = None
    verify: bool = False
    is_last: bool = False

    def as_text(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def of(cls, text: str) -> "Header":
        return cls(**json.loads(text))

    def tensors(self, memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return views of the tensors in a bucket."""
        found = []
        for name, shape, kind, offset in self.entries:
            dtype: torch.dtype = getattr(torch, kind)
            end = offset + torch.Size(shape).numel() * dtype.itemsize
            found.append((name, memory[offset:end].view(dtype).view(shape)))
        return found


def fill(
    tensors: Iterable[tuple[str, torch.Tensor]], buffers: list[torch.Tensor], allocate: Callable[[int], torch.Tensor]
) -> Iterator[tuple[Header, torch.Tensor]]:
    """Copy tensors into two buffers in turn, and yield each that is full with its header.

    Args:
        buffers: two of ``allocate``'s; a larger one replaces one that is too small for a tensor.
        allocate: returns a uint8 tensor of so many bytes that the worker can read.
    """
    turn, at, header = 0, ANSWER_BYTES, Header(is_first=True)
    for name, tensor in tensors:
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        if header.entries and at + tensor.nbytes > buffers[turn].numel():
            yield header, buffers[turn]
            turn, at, header = 1 - turn, ANSWER_BYTES, Header()
        if at + tensor.nbytes > buffers[turn].numel():
            buffers[turn] = allocate(at + tensor.nbytes)
        buffers[turn][at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        header.entries.append((name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), at))
        at += tensor.nbytes
    header.is_last = True
    yield header, buffers[turn]


def synchronize(memory: torch.Tensor) -> None:
    """Wait until the other process may use a bucket: what this one has queued that reads or writes it is done.

    Not for the whole device: the next round of an exchange is under way on other streams.
    """
    if memory.device.type != "cpu":
        torch.get_device_module(memory.device).current_stream(memory.device).synchronize()


def write_answer(memory: torch.Tensor, text: str) -> None:
    """Write the worker's answer, cut to what fits; empty where all is well."""
    data = text.encode()[: ANSWER_BYTES - 1]
    memory[: len(data) + 1] = torch.tensor([*data, 0], dtype=torch.uint8)


def answer_of(memory: torch.Tensor) -> str:
    return bytes(memory[:ANSWER_BYTES].tolist()).partition(b"\0")[0].decode(errors="replace")
