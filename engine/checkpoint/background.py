"""Run jobs in a background thread, one at a time, with their own process group, on copies in host memory."""

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..topology.dtensor import local_tensor

__all__ = ["Background", "copied_to_host"]

logger = logging.getLogger("epfsdp2")

_STAGING_BYTES = 64 << 20
_MOST_THREADS, _LEAST_BYTES = 4, 1 << 20  # threads per rank; bytes per thread


class Background:
    """Runs jobs that all ranks start in the same order; collective to create.

    Attributes:
        group: a gloo group for the jobs' collectives, because training uses the default group meanwhile.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1)  # a process that exits normally finishes the job first
        self._job: Future[None] | None = None

    def start(self, name: str, job: Callable[[], None]) -> None:
        """Start a job once the previous one has ended; raise the error of that one."""
        self.wait()
        self._job = self._thread.submit(_run, name, job)

    def wait(self) -> None:
        """Wait for the job to end, and raise its error, once."""
        job, self._job = self._job, None
        if job is not None:
            job.result()


def _run(name: str, job: Callable[[], None]) -> None:
    try:
        job()
    except BaseException as failure:
        if dist.get_rank() == 0:
            logger.error("epfsdp2: %s has failed, which ends the run when the next one begins: %s", name, failure)
        raise


def copied_to_host(
    tensors: Mapping[str, torch.Tensor], kept: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Copy tensors and shards to pageable host memory; return when the copies are complete.

    Several threads copy, because a Ray actor has ``OMP_NUM_THREADS=1``. Tensors of an accelerator pass two pinned
    buffers, one filled while the other is emptied. Direct copies to pageable memory are several times slower. Pinning
    all of it would waste memory: torch's host allocator rounds blocks up to powers of two and never frees them.

    Args:
        kept: earlier copies that are no longer read. Those that fit are overwritten, because the first write to new
            memory is several times slower. The others are removed from the dict.
    """
    kept = {} if kept is None else kept
    for name, copy in list(kept.items()):
        if name not in tensors or _layout(copy) != _layout(tensors[name]):
            del kept[name]  # frees its memory before new copies are allocated
    copies = {
        name: kept[name] if name in kept else torch.empty_like(tensor.detach(), device="cpu")
        for name, tensor in tensors.items()
    }
    staging: _Staging | None = None
    with _Threads() as threads:
        for name, tensor in tensors.items():
            source, target = local_tensor(tensor.detach()), local_tensor(copies[name])
            if not (source.is_contiguous() and target.is_contiguous()):
                target.copy_(source)
            elif _on_host(source):
                threads.copy(_bytes(target), _bytes(source))
            else:
                staging = staging or _Staging(source.device, threads)
                staging.copy(_bytes(target), _bytes(source))
        if staging is not None:
            staging.finish()
    return copies


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the layout, equal for two tensors if one can hold a copy of the other."""
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return tensor.shape, tensor.dtype, local_tensor(tensor).shape, placed


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


class _Threads(ThreadPoolExecutor):
    """Copies within host memory: one thread reaches some GB/s, a few threads the memory's bandwidth."""

    def __init__(self) -> None:
        ranks = int(os.environ.get("RAY_LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        self._count = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))
        super().__init__(self._count, "copies to the host")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy 1-D bytes; blocks."""
        size = max(_LEAST_BYTES, -(-target.numel() // self._count))
        if size >= target.numel():
            target.copy_(source)
            return
        for _ in self.map(torch.Tensor.copy_, target.split(size), source.split(size)):
            pass


class _Staging:
    """Copies from a device through two pinned buffers."""

    def __init__(self, device: torch.device, threads: _Threads, nbytes: int = _STAGING_BYTES):
        module = torch.get_device_module(device)
        self._buffers = [
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available()) for _ in range(2)
        ]
        self._arrivals = [module.Event() for _ in range(2)]
        self._targets: list[torch.Tensor | None] = [None, None]
        self._stream, self._turn, self._threads = module.current_stream(device), 0, threads

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying 1-D bytes."""
        parts = (tensor.split(self._buffers[0].numel()) for tensor in (target, source))
        for part, values in zip(*parts, strict=True):
            self._empty(self._turn)
            self._buffers[self._turn][: values.numel()].copy_(values, non_blocking=True)
            self._arrivals[self._turn].record(self._stream)
            self._targets[self._turn] = part
            self._turn = 1 - self._turn

    def finish(self) -> None:
        """Wait for the last copies."""
        for turn in (self._turn, 1 - self._turn):
            self._empty(turn)

    def _empty(self, turn: int) -> None:
        target, self._targets[turn] = self._targets[turn], None
        if target is not None:
            self._arrivals[turn].synchronize()
            self._threads.copy(target, self._buffers[turn][: target.numel()])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
