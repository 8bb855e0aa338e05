"""What a trainer rank and its SGLang worker share: memory for slices, and for the worker's answer.

A bucket is one uint8 tensor and a header. Its first bytes are the worker's answer: SGLang returns no exception of a
weight loader, and one that leaves a worker ends the server.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from ..transport.buckets import Entry, buckets_of

__all__ = ["ANSWER_BYTES", "Header", "answer_of", "fill", "synchronize", "write_answer"]

ANSWER_BYTES = 4096


@dataclass
class Header:
    """What a bucket holds; goes as the name of its tensor."""

    entries: list[Entry] = field(default_factory=list)
    is_first: bool = False  # of a sync
    layouts: list[dict[str, str]] | None = None  # planned for each worker; in the first bucket of a first sync
    verify: bool = False  # in the first bucket, whether checksums come last
    is_last: bool = False

    def as_text(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def of(cls, text: str) -> "Header":
        return cls(**json.loads(text))


def fill(
    tensors: Iterable[tuple[str, torch.Tensor]], buffers: list[torch.Tensor], allocate: Callable[[int], torch.Tensor]
) -> Iterator[tuple[Header, torch.Tensor]]:
    """Copy tensors into two buffers in turn, and yield each that is full with its header.

    One that is too small for a tensor is replaced by ``allocate``'s.
    """
    turns = itertools.cycle((0, 1))

    def following(nbytes: int) -> torch.Tensor:
        if buffers[turn := next(turns)].numel() < nbytes:
            buffers[turn] = allocate(nbytes)
        return buffers[turn]

    for number, (entries, memory, is_last) in enumerate(buckets_of(tensors, following, ANSWER_BYTES)):
        yield Header(entries, is_first=number == 0, is_last=is_last), memory


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
