"""The lines of a failed command's log that say why it failed."""

import re
from itertools import takewhile
from pathlib import Path

__all__ = ["cause"]

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RAY_PREFIX = re.compile(r"^\((?:\S+ )?pid=\d+(?:, [^)]*)?\)\s?")  # of a line that a worker printed
# The last line of a traceback, or an error of Hydra. Wrappers of an error say less than the error.
_ERROR = re.compile(
    r"^(?![\w.]*(?:ChildFailedError|RayTaskError|RayActorError))"
    r"(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b\s*(?::|\(|$)"
    r"|Could not (?:override|find|load)|Error merging|In '|Key ')"
)
_END = ("Traceback", "Set the environment variable HYDRA")


def cause(log: Path) -> list[str]:
    """Return at most 12 lines: the driver's last error, else the first error of a worker, else the last lines.

    The driver repeats a worker's error at the end of a chain of tracebacks, so its last error is the cause.
    """
    lines = [_ANSI.sub("", line).rstrip() for line in log.read_text(errors="replace").splitlines()]
    all_lines = [_RAY_PREFIX.sub("", line) for line in lines if line]
    for found, which in (([line for line in lines if line and not _RAY_PREFIX.match(line)], -1), (all_lines, 0)):
        if errors := [i for i, line in enumerate(found) if _ERROR.match(line)]:
            start = errors[which]
            while start - 1 in errors:
                start -= 1  # Hydra prints several lines
            return list(takewhile(lambda line: not line.startswith(_END), found[start : start + 12]))
    return all_lines[-12:]
