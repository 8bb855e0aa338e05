"""Compile each Triton kernel once per node: the ranks of a node share a cache, and all miss at the same time.

The first rank that misses locks the kernel's folder in Triton's cache. The others wait and find the kernel there. The
lock is held only during a compile, so it can't wait for a collective, and the system unlocks it if its holder dies.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import triton
from triton.runtime.cache import FileCacheManager

__all__ = ["compile_once_per_node"]

logger = logging.getLogger("epfsdp2")

_MOST_SECONDS, _PAUSE_SECONDS = 300.0, 0.02  # shorter than the time limit of NCCL's collectives, 10 minutes


def compile_once_per_node() -> None:
    """Let this process wait for kernels that another one compiles, unless the user has set up Triton's cache."""
    if triton.knobs.cache.manager_class is None and not triton.knobs.compilation.always_compile:
        triton.knobs.cache.manager_class = _SharedCache


class _SharedCache(FileCacheManager):
    """One kernel's folder in Triton's cache, for one compile; after it Triton drops the object, and so the lock.

    Triton compiles a kernel if ``get_group`` finds nothing, and a launcher's C code if ``get_file`` does.
    """

    _lock: int | None = None

    def __init__(self, key: str, override: bool = False, dump: bool = False):
        super().__init__(key, override, dump)
        self._may_lock = not override and not dump

    def get_group(self, filename: str) -> dict[str, str] | None:
        return super().get_group(filename) or self._wait_and(super().get_group, filename)

    def get_file(self, filename: str) -> str | None:
        return super().get_file(filename) or self._wait_and(super().get_file, filename)

    def _wait_and(self, look_up: Callable[[str], Any], filename: str) -> Any:
        """Return the result of another process; None if this one has to compile."""
        if self._may_lock:
            self._may_lock, self._lock = False, _locked(os.path.join(self.cache_dir, "lock"))
        return look_up(filename)

    def __del__(self) -> None:
        if self._lock is not None:
            os.close(self._lock)


def _locked(path: str) -> int | None:
    """Lock a file and return its descriptor; None if it can't be locked in time."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + _MOST_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_PAUSE_SECONDS)
                continue
            logger.warning("epfsdp2: %s: compiled here too, because another process did not finish in time", path)
        except OSError:  # a file system without locks
            pass
        os.close(descriptor)
        return None
