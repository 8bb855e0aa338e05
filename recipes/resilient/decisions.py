"""Decides after a failed attempt whether to restart, after which pause, or to give up, and why."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Failure", "backoff_seconds", "reason_to_give_up", "report"]

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0
# What differs between two failures of one cause: addresses, ids, numbers.
_VARYING = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{16,}\b|\d+(?:\.\d+)*", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """An attempt that ended before the run did.

    Args:
        step: the step that it failed in.
        lines: what its log says of the cause.
        mesh: what it ran on.
        resumed: the step that it went on from; None where it began anew.
    """

    step: int
    lines: Sequence[str] = field(compare=False)
    mesh: str = ""
    resumed: int | None = None

    @property
    def reason(self) -> str:
        """The cause without what differs from one time to the next."""
        return _VARYING.sub("#", self.lines[0].strip() if self.lines else "")


def reason_to_give_up(failures: Sequence[Failure], max_restarts: int) -> str | None:
    """Return why the last failure is the end of the run; None if it is to be started again."""
    last = failures[-1]
    if any(other.step == last.step and other.reason == last.reason for other in failures[:-1]):
        return f"step {last.step} has failed twice for the same reason"
    if len(failures) > max_restarts:
        return f"it was started again {max_restarts} times (--max-restarts)"
    return None


def backoff_seconds(failures: Sequence[Failure], first: float = _FIRST_PAUSE) -> float:
    """Return the pause after the last failure: it doubles while no attempt saves a step, up to five minutes."""
    without_a_save = itertools.takewhile(lambda failure: failure.resumed == failures[-1].resumed, reversed(failures))
    return min(_LONGEST_PAUSE, first * 2 ** (sum(1 for _ in without_a_save) - 1))


def report(failures: Sequence[Failure], why: str) -> list[str]:
    """Return the lines that say why the run was given up, and every failure."""
    said = [f"The run was given up: {why}."]
    for number, failure in enumerate(failures, start=1):
        begun = "from the beginning" if failure.resumed is None else f"from step {failure.resumed}"
        said.append(f"attempt {number}, {begun}, on {failure.mesh}, failed in step {failure.step}:")
        said += [f"    {line}" for line in failure.lines]
    return said
