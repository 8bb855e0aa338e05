"""Map a GPU's memory in another process, as a rollout worker maps the buckets of a weight sync."""

import queue
from collections.abc import Iterator
from typing import Any

import torch
import torch.multiprocessing as mp

from .check import Ranks, Row

__all__ = ["judge_receiver", "measure_receiver"]

_SECONDS = 60.0  # every rank of a node starts a process that imports torch


def _receive(tensors: Any, answers: Any) -> None:
    """Answer each received tensor with its sum, until None arrives."""
    while (tensor := tensors.get(timeout=_SECONDS)) is not None:
        answers.put(tensor.double().sum().item())
        del tensor


def measure_receiver(ranks: Ranks) -> dict[str, Any]:
    """Send a tensor to a child process by CUDA IPC or shared memory, and compare the sum that it returns."""
    spawn = mp.get_context("spawn")
    tensors, answers = spawn.Queue(), spawn.Queue()
    process = spawn.Process(target=_receive, args=(tensors, answers), daemon=True)
    process.start()
    values = torch.arange(1000.0, device=ranks.device)
    tensors.put(values)
    total = None
    try:
        total = answers.get(timeout=_SECONDS)
    except queue.Empty:  # the process has printed its error
        process.kill()
    tensors.put(None)
    process.join(_SECONDS)
    return {"same": total == values.double().sum().item(), "status": process.exitcode}


def judge_receiver(found: list[dict[str, Any]], ranks: Ranks) -> Iterator[Row]:
    broken = [str(rank) for rank, each in enumerate(found) if not each["same"] or each["status"]]
    how = "CUDA IPC" if ranks.device == "cuda" else "shared memory"
    value = f"other values, or an error, on rank {', '.join(broken)}" if broken else f"{how}, equal"
    yield Row("a tensor to another process", value, "equal", "wrong" if broken else "right")
