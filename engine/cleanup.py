"""Find and remove shared-memory segments and socket files that a weight sync, vLLM and SGLang leave behind.

verl kills the workers of vLLM, and of tensor-parallel SGLang, at the end of a job, so their message queues stay as
``psm_*`` in /dev/shm. A killed job also leaves its weight bucket (``verl_weights_*``) and its sockets.

An unused file may belong to another container with the same /dev/shm (``docker run --ipc=host``), whose processes are
not in this one's /proc. So a run notes its own processes' files, and at their end removes the unused ones. Linux only.
"""

import glob
import logging
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["held_by", "present", "remove_unused", "report_leftovers"]

# verl's weight buckets, collectives of vLLM's CPU build, Python's unnamed segments (message queues).
SEGMENTS = ("/dev/shm/verl_weights_*", "/dev/shm/*-cpushm_*", "/dev/shm/psm_*")
SOCKETS = ("/tmp/rl-colocate-zmq-*.sock",)

# A segment younger than this may be between its creation and its first mapping.
_MINIMUM_AGE_SECONDS = 2.0

logger = logging.getLogger("epfsdp2")


def present() -> set[str]:
    """Return the paths of this user's segments and sockets."""
    return set(_own((*SEGMENTS, *SOCKETS)))


def held_by(processes: Iterable[int]) -> set[str]:
    """Return the paths of this user's segments and sockets that any of these processes has mapped, open or bound."""
    return _used_files(f"/proc/{number}" for number in processes) & present()


def remove_unused(paths: Iterable[str]) -> None:
    """Remove the segments and sockets that no process has mapped, open or bound."""
    for path in set(paths) - _used_files(glob.glob("/proc/[0-9]*")):
        with suppress(FileNotFoundError, PermissionError):
            os.unlink(path)


def report_leftovers() -> None:
    """Log segments that no visible process uses, in one line."""
    latest = time.time() - _MINIMUM_AGE_SECONDS
    old = {path: status.st_size for path, status in _own(SEGMENTS).items() if status.st_ctime <= latest}
    found = sorted(old.keys() - _used_files(glob.glob("/proc/[0-9]*"))) if old else []
    if found:
        logger.warning(
            "epfsdp2: %d shared-memory segments (%d MB) such as %s are used by no process that is visible from here. "
            "An earlier run may have left them; if no other container shares /dev/shm, they can be deleted",
            len(found),
            sum(old[path] for path in found) >> 20,
            found[0],
        )


def _own(patterns: Iterable[str]) -> dict[str, os.stat_result]:
    """Return this user's files that match the globs, with their status."""
    found = {}
    for path in (path for pattern in patterns for path in glob.glob(pattern)):
        with suppress(FileNotFoundError):
            status = os.lstat(path)
            if status.st_uid == os.getuid():
                found[path] = status
    return found


def _used_files(processes: Iterable[str]) -> set[str]:
    """Return every file that processes, by their folders in /proc, have mapped, open or bound.

    Other users' processes are not readable, but they can't open this user's segments, which have mode 0600.
    """
    bound, used = {}, set()
    with suppress(OSError), open("/proc/net/unix") as table:
        bound = {f"socket:[{row[6]}]": row[7] for row in map(str.split, table) if len(row) == 8}
    for process in processes:
        with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            # By name: /proc/*/maps can show another device number than stat.
            with open(f"{process}/maps") as maps:
                used.update(re.findall(r"(/dev/shm/\S+)", maps.read()))
            for descriptor in os.listdir(f"{process}/fd"):
                with suppress(FileNotFoundError):
                    file = os.readlink(f"{process}/fd/{descriptor}")
                    used.add(bound.get(file, file))
    return used
