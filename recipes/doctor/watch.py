"""End all ranks when one exceeds the time limit of a check, and name the ranks that hang, with their stacks.

Ranks meet in a store, because a collective that hangs would block a meeting by collectives. A thread on each rank polls
its own deadline and the others'. A call that holds the GIL blocks that thread too; then ``faulthandler``, which needs
no GIL, writes the stack to stderr.
"""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["Watch", "hanging"]

_LATER = 2.0  # seconds after the limit at which faulthandler writes the stack
_ANSWER_SECONDS = 5.0  # for the stacks of all ranks
_OVER, _SAID = "over", "said"
_FRAMES = 6  # innermost frames of a printed stack
_WAITS = ("wait(", "synchronize(", "barrier(", "all_to_all", "all_gather", "all_reduce", ".item()", ".tolist()")


class Watch:
    """The deadline of this rank's check, and its meetings with the others; rank 0 prints who hangs by ``say``."""

    def __init__(self, store: dist.Store, rank: int, world: int, say: Callable[[str], None]):
        self._store, self._rank, self._world, self._say = store, rank, world, say
        # The thread needs its own connection: the main one blocks while ranks create groups.
        self._own: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._thread_watched = threading.get_ident()
        self._check, self._noted, self._deadline, self._limit = "", "", float("inf"), 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()
        self._closed.set()
        self._thread.join()  # or the process aborts if the interpreter exits during a call to the store

    def begin(self, check: str, seconds: float) -> None:
        self._check, self._noted, self._limit = check, "", seconds
        faulthandler.dump_traceback_later(seconds + _LATER)
        self._deadline = time.monotonic() + seconds

    def end(self) -> None:
        self._deadline = float("inf")
        faulthandler.cancel_dump_traceback_later()

    def note(self, text: str) -> None:
        """Record this rank's next operation, for the report if it hangs."""
        self._noted = text

    def meet(self, mine: Any, answer: Callable[[list[Any]], Any] = lambda everyones: None) -> Any:
        """Gather ``mine`` (JSON-serialisable) on rank 0, and return ``answer`` of the gathered list on every rank."""
        self._store.set(f"{self._check}/{self._rank}", json.dumps(mine))
        if self._rank == 0:
            keys = [f"{self._check}/{rank}" for rank in range(self._world)]
            _is_set(self._store, keys)
            said = json.dumps(answer([json.loads(value) for value in self._store.multi_get(keys)]))
            self._store.set(f"{self._check}/answer", said)
        _is_set(self._store, [f"{self._check}/answer"])
        return json.loads(self._store.get(f"{self._check}/answer"))

    def _look(self) -> None:
        try:
            while time.monotonic() < self._deadline and not self._own.check([_OVER]):
                if self._closed.wait(0.1):
                    return
            self._stop()
        except Exception as error:  # the rank that hosts the store is gone
            print(f"rank {self._rank}, {self._check}: {error}\n{self._stack()}", file=sys.stderr, flush=True)
        os._exit(1)

    def _stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._own.set(_OVER, self._check)
        self._own.set(f"stack/{self._rank}", self._stack())
        if self._rank:
            if not _is_set(self._own, [_SAID], 2 * _ANSWER_SECONDS):
                print(f"rank {self._rank} {self._stack()}", file=sys.stderr, flush=True)
            return
        stacks = {}
        _is_set(self._own, [f"stack/{rank}" for rank in range(self._world)], _ANSWER_SECONDS)
        for rank in range(self._world):
            there = self._own.check([f"stack/{rank}"])
            stacks[rank] = self._own.get(f"stack/{rank}").decode() if there else "gave no answer"
            if self._own.check([f"{self._check}/{rank}"]):
                done = json.loads(self._own.get(f"{self._check}/{rank}"))
                error = done.get("error") if isinstance(done, dict) else None
                stacks[rank] = f"failed: {error}" if error else "has ended the check, and waits"
        self._say(f"{self._check} did not end within {self._limit:g} s.\n{hanging(stacks)}")
        self._own.set(_SAID, "")

    def _stack(self) -> str:
        """Return the state and the innermost frames of the watched thread, the innermost last."""
        frame = sys._current_frames()[self._thread_watched]
        frames = traceback.extract_stack(frame)[-_FRAMES:]
        lines = [f"    {'/'.join(Path(f.filename).parts[-3:])}:{f.lineno} {f.name}: {f.line}" for f in frames]
        filename, line = frames[-1].filename, frames[-1].line or ""
        waits = "torch/distributed" in filename or any(word in line for word in _WAITS)
        at = f" at {self._noted}" if self._noted else ""
        return "\n".join([f"{'waits' if waits else 'hangs'}{at}:", *lines])


def _is_set(store: dist.Store, keys: list[str], seconds: float = float("inf")) -> bool:
    """Wait until the store has these keys, or for some seconds; return whether it has them."""
    deadline = time.monotonic() + seconds
    while not (there := store.check(keys)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return there


def hanging(stacks: Mapping[int, str]) -> str:
    """Group ranks by stack: failed and hanging ranks before waiting ones, smaller groups first."""
    ranks: dict[str, list[str]] = {}
    for rank, stack in stacks.items():
        ranks.setdefault(stack, []).append(str(rank))
    waiting = ("waits", "has ended")
    order = sorted(ranks, key=lambda stack: (stack.startswith(waiting), len(ranks[stack])))
    return "\n".join(f"rank {', '.join(ranks[stack])} {stack}" for stack in order)
