"""What the trainer's process and its ranks tell each other after a failure: JSON files in a folder that all see.

    ask.json                      from the trainer: the id of a question
    <id>-<role>-<rank>.json       from a rank: how many updates its state has had; None once an optimizer steps again
    write.json                    from the trainer: which ranks of a role are to write, where, and after which update
    <id>-<role>-<rank>-w.json     from such a rank: the files that it has written, or its error

Ranks may be in the middle of a collective that never ends, so a thread of each reads and writes these.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["ASK", "POLL_SECONDS", "WRITE", "answer_name", "read", "tell"]

ASK, WRITE = "ask.json", "write.json"
POLL_SECONDS = 1.0  # in which a rank looks for a file


def answer_name(ask: str, role: str, rank: int | str, has_written: bool = False) -> str:
    return f"{ask}-{role}-{rank}{'-w' if has_written else ''}.json"


def tell(folder: Path, name: str, message: Mapping[str, Any]) -> None:
    """Write a message; a reader sees all of it or none."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{name}.{os.getpid()}.new"
    written.write_text(json.dumps(message))
    written.replace(folder / name)


def read(folder: Path, name: str) -> dict[str, Any] | None:
    """Return a message; None if it is not there."""
    try:
        return json.loads((folder / name).read_text())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None
