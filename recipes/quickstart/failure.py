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
    """At most 12 lines: the first error's message that is not merely about another one, else the last lines.

    Wrappers (Ray's ``RayTaskError``, torchrun's ``ChildFailedError``) come after what they wrap and say less.
    """
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _READ_BYTES))
        lines = [_plain(line) for line in file.read().decode(errors="replace").splitlines()]
    errors = [i for i, line in enumerate(lines) if _ERROR_LINE.match(line) or line.startswith(_HYDRA)]
    telling = [i for i in errors if not re.match(r"^[\w.]*(ChildFailedError|RayTaskError|RayActorError)", lines[i])]
    if not errors:
        return [line for line in lines if line.strip()][-_SHOWN:]
    start = (telling or errors)[0]
    shown = [line for line in lines[start : start + _SHOWN] if line.strip()]
    end = next((i for i, line in enumerate(shown[1:], 1) if line.startswith("Traceback")), len(shown))
    return shown[:end]


def _plain(line: str) -> str:
    return _RAY_PREFIX.sub("", _ANSI.sub("", line)).rstrip()
