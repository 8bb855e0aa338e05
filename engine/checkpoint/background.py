"""Run jobs in a background thread, one at a time, with a process group of their own, on copies in the host's memory."""

import logging
import threading
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from ..topology.dtensor import local_tensor

__all__ = ["Background", "copied_to_host"]

logger = logging.getLogger("epfsdp2")

_STAGING_BYTES = 64 << 20


class Background:
    """Runs jobs that all ranks start in the same order; collective to create.

    Attributes:
        group: a gloo group for the jobs' collectives, because training uses the default group meanwhile.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, name: str, job: Callable[[], None]) -> None:
        """Start a job once the previous one has ended.

        Raises:
            BaseException: the error of the previous job.
        """
        self.wait()
        # Not a daemon: a process that exits normally finishes the job first.
        self._thread = threading.Thread(target=self._run, args=(name, job), name=name)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job to end.

        Raises:
            BaseException: the error of the job; only the first call raises it.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as failure:
            self._failure = failure
            if dist.get_rank() == 0:
                logger.error("epfsdp2: %s has failed, which ends the run when the next one begins: %s", name, failure)


def copied_to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors, sharded ones too, to memory of the host that is not pinned; waits until it is done.

    From an accelerator they go through two pinned buffers, one of which is filled while the other is emptied. A copy
    straight to pageable memory has a fraction of the bandwidth. To pin all of the memory would keep it: torch's host
    allocator rounds blocks up to powers of two and does not return them (``ATen/core/CachingHostAllocator.h``, 2.13).
    """
    copies = {name: torch.empty_like(tensor.detach(), device="cpu") for name, tensor in tensors.items()}
    staging: _Staging | None = None
    for name, tensor in tensors.items():
        source, target = local_tensor(tensor.detach()), local_tensor(copies[name])
        if _on_host(source) or not (source.is_contiguous() and target.is_contiguous()):
            target.copy_(source)
            continue
        staging = staging or _Staging(source.device)
        staging.copy(target, source)
    if staging is not None:
        staging.finish()
    return copies


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


class _Staging:
    """Copies from a device through two pinned buffers."""

    def __init__(self, device: torch.device, nbytes: int = _STAGING_BYTES):
        module = torch.get_device_module(device)
        self._buffers = [
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available()) for _ in range(2)
        ]
        self._arrivals = [module.Event() for _ in range(2)]
        self._targets: list[torch.Tensor | None] = [None, None]
        self._stream, self._turn = module.current_stream(device), 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy; both are contiguous."""
        parts = (_bytes(tensor).split(self._buffers[0].numel()) for tensor in (target, source))
        for part, values in zip(*parts, strict=True):
            self._empty(self._turn)
            self._buffers[self._turn][: values.numel()].copy_(values, non_blocking=True)
            self._arrivals[self._turn].record(self._stream)
            self._targets[self._turn] = part
            self._turn = 1 - self._turn

    def finish(self) -> None:
        """Wait for what was started last."""
        for turn in (self._turn, 1 - self._turn):
            self._empty(turn)

    def _empty(self, turn: int) -> None:
        target, self._targets[turn] = self._targets[turn], None
        if target is not None:
            self._arrivals[turn].synchronize()
            target.copy_(self._buffers[turn][: target.numel()])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
