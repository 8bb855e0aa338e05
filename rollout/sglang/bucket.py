"""Buckets shared by a trainer rank and its SGLang worker: memory for slices and for the worker's answer.

A bucket is one uint8 tensor and a header. Its first bytes are the worker's answer, because SGLang does not return a
weight loader's exception: an uncaught one ends the server.
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
    """A bucket's contents, sent as JSON in the place of the tensor's name."""

    entries: list[Entry] = field(default_factory=list)
    is_first: bool = False  # first bucket of a sync
    layouts: list[dict[str, str]] | None = None  # planned layout of each worker, to compare with its own
    verify: bool = False  # whether checksums follow the weights; set in the first bucket
    is_last: bool = False

    def as_text(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def of(cls, text: str) -> "Header":
        return cls(**json.loads(text))


def fill(
    tensors: Iterable[tuple[str, torch.Tensor]], buffers: list[torch.Tensor], allocate: Callable[[int], torch.Tensor]
) -> Iterator[tuple[Header, torch.Tensor]]:
    """Copy tensors into two alternating ``buffers``, enlarged for large tensors; yield each full one with a header."""
    turns = itertools.cycle((0, 1))

    def following(nbytes: int) -> torch.Tensor:
        if buffers[turn := next(turns)].numel() < nbytes:
            buffers[turn] = allocate(nbytes)
        return buffers[turn]

    for number, (entries, memory, is_last) in enumerate(buckets_of(tensors, following, ANSWER_BYTES)):
        yield Header(entries, is_first=number == 0, is_last=is_last), memory


def synchronize(memory: torch.Tensor) -> None:
    """Wait for the current stream, so that the other process may use the bucket.

    Synchronizing the device instead would also wait for the next round of the exchange on other streams.
    """
    if memory.device.type != "cpu":
        torch.get_device_module(memory.device).current_stream(memory.device).synchronize()


def write_answer(memory: torch.Tensor, text: str) -> None:
    """Write the worker's answer, truncated to fit; empty on success."""
    data = text.encode()[: ANSWER_BYTES - 1]
    memory[: len(data) + 1] = torch.tensor([*data, 0], dtype=torch.uint8)


def answer_of(memory: torch.Tensor) -> str:
    return bytes(memory[:ANSWER_BYTES].tolist()).partition(b"\0")[0].decode(errors="replace")
