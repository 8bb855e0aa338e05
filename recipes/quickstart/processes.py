"""Starts verl's commands and leaves nothing of them behind.

Ray's daemons, Ray's workers and vLLM's engines are grandchildren in sessions of their own. Instead of looking for them
by name, the quickstart becomes the *child subreaper* (``man 2 prctl``): whatever of its descendants loses its parent is
handed to it by the kernel, so that its process tree is complete at any time, and ending the tree ends everything.
"""

import contextlib
import ctypes
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import psutil

from ...rollout.cleanup import SOCKETS, existing_segments, held_by, remove_leftovers

__all__ = ["Interrupted", "ProcessTree"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Ray's own shutdown takes about two seconds; what has not gone by then is killed.
_GRACE_SECONDS = 8.0
_POLL_SECONDS = 0.3
_LOOK_SECONDS = 5.0  # between two looks at which shared memory and sockets the processes have
_libc = ctypes.CDLL(None, use_errno=True)


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived. Not an ``Exception``: nothing but the clean-up should catch it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number, _frame):
    # Once: a second signal, however soon, must not stop the clean-up that the first one starts.
    _ignore_signals()
    raise Interrupted(number)


def _ignore_signals() -> None:
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _die_with_parent() -> None:
    # For the one way out that leaves no time to clean up: SIGKILL of the quickstart. Ray's daemons follow the driver.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ProcessTree:
    """Context manager: commands run inside it, and when it ends nothing of them is left.

    It owns a temporary directory (``folder``) for Ray's session; its path is short because a unix socket's path may
    have 107 characters and Ray puts about 60 below it.
    """

    def __init__(self):
        self.folder = Path()

    def __enter__(self) -> "ProcessTree":
        if sys.platform == "linux":
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._before = existing_segments() | set(glob.glob("/tmp/*.sock"))
        self._segments: set[str] = set()
        self._sockets: set[str] = set()
        self._looked = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="epfsdp2-", dir="/tmp"))
        for number in _STOPPING:
            signal.signal(number, _interrupt)
        return self

    def __exit__(self, *_exc) -> None:
        try:
            _ignore_signals()
        finally:  # also where the first signal arrives just now
            self._end_descendants()
            self._remove_leftovers()
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, command: list[str], env: dict[str, str], log: Path, on_tick: Callable[[], None]) -> int:
        """Run ``command`` with its output in ``log``, calling ``on_tick`` a few times a second; its exit status.

        The command gets a session of its own: a Ctrl-C in the terminal reaches the quickstart alone, which then ends
        the command in order. Descendants that outlive the command are ended before this returns.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
            while (status := process.poll()) is None:
                on_tick()
                if time.monotonic() - self._looked > _LOOK_SECONDS:
                    self._look()
                time.sleep(_POLL_SECONDS)
        on_tick()
        self._end_descendants()
        return status

    def _look(self) -> None:
        """Note the shared memory that the processes have mapped, and the sockets that are bound: theirs or others'."""
        self._looked = time.monotonic()
        self._segments |= held_by(process.pid for process in psutil.Process().children(recursive=True))
        with contextlib.suppress(OSError), open("/proc/net/unix") as table:
            self._sockets.update(line.split()[-1] for line in table)

    def _end_descendants(self) -> None:
        """SIGTERM to direct children, whose own clean-up is the most orderly one; SIGKILL to all that remain."""
        self._look()
        for child in _living(psutil.Process().children()):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        while _reap_and_list() and time.monotonic() < deadline:
            time.sleep(0.1)
        # Killing an orphan's parent hands us its children, so one pass may not be the last.
        while descendants := _reap_and_list():
            for process in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)

    def _remove_leftovers(self) -> None:
        """Shared memory and sockets that this run had and nobody has now: others' are not ours to remove."""
        mine = self._segments - self._before
        bound = [p for p in self._sockets - self._before if any(fnmatch(p, kind) for kind in SOCKETS)]
        remove_leftovers(mine, bound, minimum_age=0)


def _reap_and_list() -> list[psutil.Process]:
    """Living descendants, after collecting the exit status of those that were handed to us and have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return list(_living(psutil.Process().children(recursive=True)))


def _living(processes: list[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process
