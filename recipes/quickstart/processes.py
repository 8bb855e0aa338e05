"""Starts verl's commands and leaves nothing of them behind; Linux.

Ray's daemons, Ray's workers and vLLM's engines are grandchildren in sessions of their own. Instead of looking for them
by name, the quickstart becomes the *child subreaper* (``man 2 prctl``): the kernel makes it the parent of every
descendant that loses its own, so that its process tree is complete at any time, and ending the tree ends everything.
"""

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from ...engine.cleanup import held_by, present, remove_unused

__all__ = ["Interrupted", "ProcessTree"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Ray's own shutdown takes about two seconds; what has not gone by then is killed.
_GRACE_SECONDS = 8.0
_POLL_SECONDS = 0.3
_LOOK_SECONDS = 5.0  # between two looks at what the processes hold, unless there is something new
_libc = ctypes.CDLL(None)

# What verl's two trainers should find, whatever the shell has: one thread per process, and a Ray of their own. That one
# would start a worker for each CPU in advance, and none of verl's actors takes such a worker.
_CHILD_ENV = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "RAY_prestart_worker_first_driver": "0",
}
# Its ports are this machine's alone: Ray listens on loopback where it is told that it is no cluster, and so does gloo.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "GLOO_SOCKET_IFNAME": "lo"}
_RAY_ENV = ("RAY_ADDRESS", "RAY_TMPDIR")


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived. Not an ``Exception``: nothing but the clean-up should catch it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def _on_signals(handler: Any) -> None:
    for number in _STOPPING:
        signal.signal(number, handler)


def _interrupt(number: int, _frame: Any) -> None:
    _on_signals(signal.SIG_IGN)  # a second signal, however soon, must not stop the clean-up that the first one starts
    raise Interrupted(number)


class ProcessTree:
    """Context manager: commands run inside it, and when it ends nothing of them is left.

    Attributes:
        folder: a temporary directory for Ray's session. Its path is short because a unix socket's path may have 107
            characters and Ray puts about 60 below it.
    """

    def __enter__(self) -> "ProcessTree":
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._held: set[str] = set()
        self._present: set[str] = set()
        self._looked = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="epfsdp2-", dir="/tmp"))
        _on_signals(_interrupt)
        return self

    def __exit__(self, *_exc) -> None:
        try:
            _on_signals(signal.SIG_IGN)
        finally:  # also where the first signal arrives just now
            self._end_descendants()
            remove_unused(self._held)
            shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Return the variables for verl's trainers."""
        # vLLM's sockets go where this run cleans up, not into /tmp itself.
        paths = {"VLLM_RPC_BASE_PATH": str(self.folder)}
        # Also where torch is a CUDA build on a machine without a GPU, which the platform can't tell by itself.
        device = {} if torch.accelerator.is_available() else {"VERL_PLATFORM": "cpu"}
        # Whoever has no token of this run is refused by Ray; versions before 2.52 do not ask for one.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        own = {name: value for name, value in os.environ.items() if name not in _RAY_ENV}
        return own | _CHILD_ENV | _LOOPBACK | token | paths | device

    def run(self, command: list[str], env: dict[str, str], log: Path, on_tick: Callable[[], None]) -> int:
        """Run ``command`` with its output in ``log``, calling ``on_tick`` a few times a second; return its exit status.

        The command gets a session of its own: a Ctrl-C in the terminal reaches the quickstart alone, which then ends
        the command in order. Descendants that outlive the command are ended before this returns, and all of them where
        ``on_tick`` raises.
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
                # Where the quickstart is killed and can't clean up; Ray's daemons follow their driver.
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
            )
        try:
            while (status := process.poll()) is None:
                on_tick()
                # What a sync uses is there for less than a second, and stays if its process is killed meanwhile.
                if present() - self._held != self._present or time.monotonic() - self._looked > _LOOK_SECONDS:
                    self._look()
                time.sleep(_POLL_SECONDS)
            on_tick()
        finally:
            self._end_descendants()
        return status

    def _look(self) -> None:
        """Note the shared memory and the sockets that the processes have."""
        self._looked = time.monotonic()
        there = present()
        self._held |= held_by(process.pid for process in psutil.Process().children(recursive=True))
        self._present = there - self._held

    def _end_descendants(self) -> None:
        """Terminate the children, whose own clean-up is the most orderly one, and kill all that remain.

        Until they end they go on: a weight sync that begins meanwhile makes a segment and a socket.
        """
        self._look()
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        while True:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            descendants = psutil.Process().children(recursive=True)
            if not descendants:
                return
            self._look()
            for process in descendants if time.monotonic() > deadline else ():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)
