"""Finds, in the log of a failed command, the lines that say why."""

import re
from pathlib import Path

__all__ = ["cause"]

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# What Ray puts before a line that a worker printed: "(TaskRunnerV1 pid=123) ".
_RAY_PREFIX = re.compile(r"^\((?:\S+ )?pid=\d+(?:, [^)]*)?\)\s?")
# The last line of a traceback, "package.SomeError: text", or what Hydra says of one, "SomeError('text')".
_ERROR_LINE = re.compile(r"^(?:[\w.]*\.)?\w*(?:Error|Exception|Interrupt|Exit)\b\s*(?::|\(|$)")
_HYDRA = ("Could not override", "Error merging", "In '", "Could not find", "Key '", "Could not load")
_SHOWN = 12
_READ_BYTES = 1 << 20


def cause(log: Path) -> list[str]:
    """At most 12 lines: the error that ended the driver, else the first one that anybody printed, else the last lines.

    The driver repeats a worker's error at the end of a chain of tracebacks, so its last error line is the cause. Those
    of wrappers (Ray's ``RayTaskError``, torchrun's ``ChildFailedError``) say less and are passed over.
    """
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _READ_BYTES))
        raw = [_ANSI.sub("", line).rstrip() for line in file.read().decode(errors="replace").splitlines()]
    lines = [_RAY_PREFIX.sub("", line) for line in raw]
    errors = [i for i, line in enumerate(lines) if _ERROR_LINE.match(line) or line.startswith(_HYDRA)]
    telling = [i for i in errors if not re.match(r"^[\w.]*(ChildFailedError|RayTaskError|RayActorError)", lines[i])]
    if not errors:
        return [line for line in lines if line.strip()][-_SHOWN:]
    of_driver = [i for i in telling if lines[i] == raw[i]]
    start = of_driver[-1] if of_driver else (telling or errors)[0]
    while start - 1 in of_driver:
        start -= 1  # Hydra says it in several lines
    shown = [line for i, line in enumerate(lines[start:], start) if line.strip() and not (of_driver and line != raw[i])]
    shown = shown[:_SHOWN]
    end = next(
        (
            i
            for i, line in enumerate(shown[1:], 1)
            if line.startswith(("Traceback", "Set the environment variable HYDRA"))
        ),
        len(shown),
    )
    return shown[:end]
