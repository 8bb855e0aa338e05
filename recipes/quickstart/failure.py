"""Finds, in the log of a failed command, the lines that say why."""

import re
from itertools import takewhile
from pathlib import Path

__all__ = ["cause"]

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# What Ray puts before a line that a worker printed: "(TaskRunnerV1 pid=123) ".
_RAY_PREFIX = re.compile(r"^\((?:\S+ )?pid=\d+(?:, [^)]*)?\)\s?")
# The last line of a traceback, "package.SomeError: text", or what Hydra says of one. Those of wrappers say less.
_ERROR = re.compile(
    r"^(?![\w.]*(?:ChildFailedError|RayTaskError|RayActorError))"
    r"(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b\s*(?::|\(|$)"
    r"|Could not (?:override|find|load)|Error merging|In '|Key ')"
)
_END = ("Traceback", "Set the environment variable HYDRA")
_SHOWN = 12


def cause(log: Path) -> list[str]:
    """Return at most 12 lines: the error that ended the driver, else the first that anybody printed, else the last.

    The driver repeats a worker's error at the end of a chain of tracebacks, so its last error line is the cause.
    """
    lines = [_ANSI.sub("", line).rstrip() for line in log.read_text(errors="replace").splitlines()]
    everyones = [_RAY_PREFIX.sub("", line) for line in lines if line]
    drivers = [line for line in lines if line and not _RAY_PREFIX.match(line)]
    for found, which in ((drivers, -1), (everyones, 0)):
        errors = [i for i, line in enumerate(found) if _ERROR.match(line)]
        if errors:
            start = errors[which]
            while start - 1 in errors:
                start -= 1  # Hydra says it in several lines
            return list(takewhile(lambda line: not line.startswith(_END), found[start : start + _SHOWN]))
    return everyones[-_SHOWN:]
