"""Reuse the memory of experts' weight gradients on a CPU, where a fresh page costs more than the few rows added to it.

Accelerators have a caching allocator; on a CPU large tensors are mapped from the kernel and returned to it page by
page, which takes most of a layer's backward when experts have few rows. Here a storage outlives its last tensor, and
the next gradient of its size reuses it, usually the next layer's. A buffer is free when its storage's reference count
(``torch._C._storage_Use_Count``) drops to one; there is no explicit release. Free buffers are returned to the kernel
when a backward ends.
"""

import threading
from collections.abc import Sequence

import torch

__all__ = ["MIN_BYTES", "empty", "release"]

MIN_BYTES = 1 << 20  # smaller ones come from the heap, which keeps its pages
_MAX_FREE = 4  # free storages: two weights each of two layers

_storages: list[torch.UntypedStorage] = []  # newest last
_lock = threading.Lock()
_backward = -1  # id of the backward that has a release queued


def empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return ``like.new_empty(shape)``, contiguous, in memory that may be reused."""
    size = torch.Size(shape)
    nbytes = size.numel() * like.element_size()
    if nbytes < MIN_BYTES or like.device.type != "cpu":
        return like.new_empty(size)
    _release_after_backward()
    with _lock:
        free = [storage for storage in _storages if _is_free(storage)]
        storage = next((storage for storage in reversed(free) if storage.nbytes() == nbytes), None)
        _drop([other for other in free if other is not storage][:-_MAX_FREE])
        if storage is None:
            storage = torch.UntypedStorage(nbytes)
            _storages.append(storage)
        return like.new_empty(0).set_(storage, 0, size)  # type: ignore[call-overload]


def release() -> None:
    """Return free buffers to the kernel."""
    with _lock:
        _drop([storage for storage in _storages if _is_free(storage)])


def _release_after_backward() -> None:
    global _backward
    running = torch._C._current_graph_task_id()
    if running != _backward:
        _backward = running
        if running != -1:
            torch.autograd.Variable._execution_engine.queue_callback(release)


def _is_free(storage: torch.UntypedStorage) -> bool:
    return torch._C._storage_Use_Count(storage._cdata) == 1


def _drop(free: Sequence[torch.UntypedStorage]) -> None:
    gone = {storage._cdata for storage in free}
    _storages[:] = [storage for storage in _storages if storage._cdata not in gone]
