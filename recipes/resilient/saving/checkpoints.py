"""Which of a run's checkpoints are complete."""

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ....engine.checkpoint.atomic_folder import MANIFEST, CheckpointError, verify_sizes

__all__ = ["NOTICE", "Saved", "latest", "saved_steps"]

NOTICE = "save_now"  # a file beside them that asks for one more
_QUEUE = "transfer_queue"  # a folder that gets this name when it is whole
_STEP = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class Saved:
    """A step's folder, and why it can't be resumed from; empty if it can."""

    step: int
    folder: Path
    fault: str = ""


def saved_steps(root: Path, with_queue: bool = False) -> list[Saved]:
    """Return the steps that are in a run's folder, in their order.

    A step is complete when each role's folder has every file of its manifest in its size, and the place in the data is
    a whole file. The engine compares checksums when it loads.

    Args:
        with_queue: whether the run's trainer saves its queue of prompts, too, which it does last.
    """
    found = [(int(match[1]), path) for path in root.glob("global_step_*") if (match := _STEP.fullmatch(path.name))]
    return [Saved(step, path, _fault(path, with_queue)) for step, path in sorted(found)]


def latest(root: Path, with_queue: bool = False) -> Saved | None:
    """Return the last complete checkpoint; None if there is none."""
    return next((saved for saved in reversed(saved_steps(root, with_queue)) if not saved.fault), None)


def _fault(folder: Path, with_queue: bool) -> str:
    roles = [path.name for path in folder.iterdir() if path.name.partition(".")[0] in ("actor", "critic")]
    for role in sorted({"actor", *(name.partition(".")[0] for name in roles)}):
        if not (folder / role / MANIFEST).is_file():
            return f"{role} was not saved to its end"
        try:
            verify_sizes(folder / role)
        except CheckpointError as error:
            return str(error)
    # verl writes it in place, so that it is there before it is whole.
    if not zipfile.is_zipfile(folder / "data.pt"):
        return "data.pt was not saved to its end"
    # Without it verl resumes and leaves out the prompts that were under way.
    if with_queue and not (folder / _QUEUE).is_dir():
        return f"{_QUEUE} was not saved to its end"
    return ""
