"""Memory for gradients of experts' weights, used again: on a CPU a new page costs more than what is computed into it.

Accelerators have an allocator that keeps what is freed; on a CPU large tensors come from the kernel and go back to it,
page by page. With few rows per expert that is most of a layer's backward. Here a storage stays when its last tensor is
gone, and the next gradient of its size takes it: that of the next layer, usually. It is told by the number of its
references (``torch._C._storage_Use_Count``), so nobody has to give anything back. What is unused when a backward ends
goes back to the kernel.
"""

import threading
from collections.abc import Sequence

import torch

__all__ = ["MIN_BYTES", "empty", "release"]

MIN_BYTES = 1 << 20  # bytes; what is smaller comes from the heap, which keeps its pages
_MAX_FREE = 4  # storages that nobody uses: two weights each of two layers

_storages: list[torch.UntypedStorage] = []  # newest last
_lock = threading.Lock()
_backward = -1  # that ends with a release


def empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Like ``like.new_empty(shape)``, contiguous, in memory that may have been another tensor's."""
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
    """Give back what nobody uses."""
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
