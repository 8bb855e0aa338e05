"""Starts commands and leaves nothing of them behind; Linux.

Ray's daemons and vLLM's engines are grandchildren in sessions of their own. The recipe becomes a *child subreaper*
(``man 2 prctl``): the kernel makes it the parent of each orphaned descendant, so ending its tree ends everything.
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
_libc = ctypes.CDLL(None)


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived; not an ``Exception``, because only the clean-up should catch it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


def _interrupt(number: int, _frame: Any) -> None:
    _on_signals(signal.SIG_IGN)  # a second signal must not stop the clean-up
    raise Interrupted(number)


class ProcessTree:
    """Context manager that runs commands, and ends all their descendants when it ends."""

    def __enter__(self) -> "ProcessTree":
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._held: set[str] = set()  # segments and sockets of the processes
        self._there = present()  # those and others', at the last look
        # For Ray's session. Ray adds about 60 of the 107 characters that a unix socket's path may have.
        self.folder = Path(tempfile.mkdtemp(prefix="epfsdp2-", dir="/tmp"))
        _on_signals(_interrupt)
        return self

    def __exit__(self, *_exc) -> None:
        try:
            _on_signals(signal.SIG_IGN)
        finally:  # also if the first signal arrives just now
            self._end_descendants()
            remove_unused(self._held)
            shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Return the variables for verl's trainers."""
        own = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
        own |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        # Ray and gloo listen on loopback alone, Ray because it believes that it is on an OS without clusters.
        own |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "GLOO_SOCKET_IFNAME": "lo"}
        own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # from Ray 2.52
        own |= {"RAY_prestart_worker_first_driver": "0"}  # verl's actors use none of the workers per CPU
        # A CUDA build of torch on a machine without a GPU misleads verl's own choice.
        own |= {} if torch.accelerator.is_available() else {"VERL_PLATFORM": "cpu"}
        return own | {"VLLM_RPC_BASE_PATH": str(self.folder), "PYTHONUNBUFFERED": "1"}

    def run(self, command: list[str], env: dict[str, str], log: Path, on_tick: Callable[[], None]) -> int:
        """Run a command with its output in ``log``, and ``on_tick`` a few times a second; return its exit status.

        All descendants have ended when this returns or raises.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so a Ctrl-C in the terminal reaches the recipe alone
                # If the recipe itself is killed, the command ends, and Ray's daemons follow their driver.
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
            )
        try:
            while (status := process.poll()) is None:
                on_tick()
                if present() != self._there:
                    self._note_held()
                time.sleep(0.3)  # a sync holds its segments for less than a second
            on_tick()
        finally:
            self._end_descendants()
        return status

    def _note_held(self) -> None:
        self._there = present()
        self._held |= held_by(process.pid for process in psutil.Process().children(recursive=True))

    def _end_descendants(self) -> None:
        """Terminate the children, which clean up in order, and kill all that remain."""
        self._note_held()
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        deadline = time.monotonic() + 8.0  # Ray's own shutdown takes about two seconds
        while descendants := psutil.Process().children(recursive=True):
            self._note_held()  # a sync that begins meanwhile makes a segment and a socket
            for process in descendants if time.monotonic() > deadline else ():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(descendants, timeout=0.05)  # reaps them, too
