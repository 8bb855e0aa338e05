"""Removes shared-memory segments and socket files that a weight sync and vLLM leave behind.

A normal end of a verl job with vLLM leaves a few ``psm_*`` segments in /dev/shm, a killed one also its weight bucket
(``verl_weights_*``) and its sockets. Only unused files are removed: segments of this user that no process maps or holds
open, and socket files that no process has bound. Uses the standard library only, and /proc, so Linux.
"""

import contextlib
import glob
import logging
import os
import re
import stat
import time
from collections.abc import Iterable

__all__ = [
    "SEGMENTS",
    "SOCKETS",
    "existing_segments",
    "held_by",
    "remove_leftovers",
    "report_leftovers",
    "unused_segments",
    "unused_sockets",
]

# verl's weight buckets, Python's unnamed segments (vLLM's message queues), the CPU build's tensor-parallel collectives.
SEGMENTS = ("/dev/shm/verl_weights_*", "/dev/shm/*-cpushm_*", "/dev/shm/psm_*")
SOCKETS = ("/tmp/rl-colocate-zmq-*.sock",)

# A segment younger than this may be between its creation and its first mapping.
_MINIMUM_AGE_SECONDS = 2.0

logger = logging.getLogger("epfsdp2")


def existing_segments() -> set[str]:
    """Return the paths of this user's segments of the kinds that a run makes, used or not."""
    return set(_own(SEGMENTS, stat.S_ISREG))


def unused_segments(patterns: Iterable[str] = SEGMENTS, minimum_age: float = _MINIMUM_AGE_SECONDS) -> list[str]:
    """Return the paths of this user's shared-memory segments that no process has mapped or open.

    Args:
        patterns: globs of absolute paths.
        minimum_age: seconds; younger segments count as used.
    """
    found = [path for path in _own(patterns, stat.S_ISREG) if _age(path) >= minimum_age]
    if not found:
        return []
    used = _used_files()
    # Compare names, not device and inode: /proc/*/maps can show another device number than stat does.
    return [path for path in found if path not in used]


def unused_sockets(patterns: Iterable[str] = SOCKETS) -> list[str]:
    """Return the paths of this user's socket files that no process has bound."""
    found = _own(patterns, stat.S_ISSOCK)
    if not found:
        return []
    with open("/proc/net/unix") as table:
        bound = {line.split()[-1] for line in table}
    return [path for path in found if path not in bound]


def remove_leftovers(
    segments: Iterable[str], sockets: Iterable[str], minimum_age: float = _MINIMUM_AGE_SECONDS
) -> list[str]:
    """Remove the unused ones of these segments and sockets and return their paths.

    Args:
        segments, sockets: globs of absolute paths.
        minimum_age: seconds; younger segments are kept.
    """
    removed = []
    for path in (*unused_segments(segments, minimum_age), *unused_sockets(sockets)):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(path)
            removed.append(path)
    return removed


def held_by(processes: Iterable[int], patterns: Iterable[str] = SEGMENTS) -> set[str]:
    """Return the paths of this user's segments that any of these processes has mapped or open.

    A run that records the segments of its own processes may remove them (``remove_leftovers``) after those have ended.
    That a segment looks unused is not enough: other containers may share /dev/shm (``docker run --ipc=host``), and
    their processes do not appear in this one's /proc.
    """
    return set(_own(patterns, stat.S_ISREG)) & _used_files(processes)


def report_leftovers() -> None:
    """Log segments that no visible process uses, in one line; removes nothing."""
    found = unused_segments()
    if found:
        logger.warning(
            "epfsdp2: %d shared-memory segments (%d MB) such as %s are used by no process that is visible from here. "
            "An earlier run may have left them; if no other container shares /dev/shm, they can be deleted",
            len(found),
            sum(_size(path) for path in found) >> 20,
            found[0],
        )


def _own(patterns: Iterable[str], kind) -> list[str]:
    found = []
    for path in sorted(path for pattern in patterns for path in glob.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if status.st_uid == os.getuid() and kind(status.st_mode):
                found.append(path)
    return found


def _age(path: str) -> float:
    try:
        return time.time() - os.lstat(path).st_ctime
    except FileNotFoundError:
        return 0.0


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0


def _used_files(processes: Iterable[int] | None = None) -> set[str]:
    """Return every file that these processes, or by default all readable ones, have mapped or open.

    Other users' processes can't be read without privileges, but they can't open this user's segments either, which
    Python creates with mode 0600.
    """
    used: set[str] = set()
    for process in glob.glob("/proc/[0-9]*") if processes is None else (f"/proc/{number}" for number in processes):
        with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            with open(f"{process}/maps") as maps:
                used.update(re.findall(r"(/dev/shm/\S+)", maps.read()))
            for descriptor in os.listdir(f"{process}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    used.add(os.readlink(f"{process}/fd/{descriptor}"))
    return used
