"""One attempt at a run: its process, its log, the step that it reaches, and a signal that asks it to save."""

import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..quickstart.failure import cause
from ..quickstart.processes import Interrupted, ProcessTree
from .saving.checkpoints import NOTICE, Saved

__all__ = ["Attempt", "Preemption"]

_STEP = re.compile(rb"\bstep:(\d+) - ")  # of verl's console logger
_TRACKER = "latest_checkpointed_iteration.txt"  # verl's, written when a save is complete


class Preemption:
    """What happens at SIGTERM: the run is asked to save, and has ``grace_seconds`` for it.

    Args:
        root: the run's folder of checkpoints.
        newest: returns the last complete one.
    """

    def __init__(self, root: Path, newest: Callable[[], Saved | None], grace_seconds: float, say: Callable[[str], Any]):
        self._root, self._newest, self._grace, self._say = root, newest, grace_seconds, say
        self._since: float | None = None
        (root / NOTICE).unlink(missing_ok=True)

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._notice)

    def _notice(self, number: int, frame: Any) -> None:
        if self._since is None:
            self._since = time.time()

    def end_if_asked(self) -> None:
        """End the run if SIGTERM has come between two attempts.

        Raises:
            Interrupted: SIGTERM has come, between two attempts.
        """
        if self._since is not None:
            raise Interrupted(signal.SIGTERM)

    def look(self) -> None:
        """Ask the run to save once SIGTERM has come, and end it when it has saved or the time is over.

        Raises:
            Interrupted: the run has saved, or the time is over.
        """
        if self._since is None:
            return
        notice, tracker = self._root / NOTICE, self._root / _TRACKER
        if not notice.exists():
            self._say(f"SIGTERM: the run saves at the end of its step, within {self._grace:g} s (--grace-seconds)")
            notice.parent.mkdir(parents=True, exist_ok=True)
            notice.touch()
        saved = self._newest() if tracker.is_file() and tracker.stat().st_mtime > self._since else None
        if saved is not None:
            self._say(f"step {saved.step} is saved in {saved.folder}")
        elif time.time() < self._since + self._grace:
            return
        else:
            last = self._newest()
            self._say(f"no save within {self._grace:g} s; the last one is {last.folder if last else 'none'}")
        notice.unlink(missing_ok=True)
        raise Interrupted(signal.SIGTERM)


class Attempt:
    """Runs a command and copies its output; see ``run``.

    Attributes:
        step: the last step that the run has logged; None before the first.
    """

    def __init__(self, log: Path):
        self._log, self._read, self._begun = log, 0, b""
        self.step: int | None = None

    def run(self, tree: ProcessTree, words: Sequence[str], env: Mapping[str, str], on_tick: Callable[[], None]) -> int:
        """Run the command to its end; return its status, when all of its processes have ended."""

        def tick() -> None:
            self._copy()
            on_tick()

        return tree.run(list(words), dict(env), self._log, tick)

    def cause(self) -> list[str]:
        """Return the log's lines that say why the attempt failed."""
        return cause(self._log) or ["it printed nothing"]

    def _copy(self) -> None:
        with self._log.open("rb") as log:
            log.seek(self._read)
            new = log.read()
        self._read += len(new)
        sys.stdout.buffer.write(new)
        sys.stdout.flush()
        whole, _, self._begun = (self._begun + new).rpartition(b"\n")
        for found in _STEP.findall(whole):
            self.step = int(found)
