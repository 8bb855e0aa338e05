"""The complete checkpoints of a run."""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...engine.checkpoint.atomic_folder import MANIFEST, CheckpointError, verify_files

__all__ = ["FOLDER", "NOTICE", "Saved", "latest", "saved_steps"]

FOLDER = "survivors"  # of the messages to ranks, beside the checkpoints
# A file beside the checkpoints: save at the end of the step. With ``FOLDER`` as text: save the last step with the
# living ranks; the trainer removes the file when it has tried.
NOTICE = "save_now"

_QUEUE = "transfer_queue"  # verl renames the folder to this when it is whole


@dataclass(frozen=True)
class Saved:
    """A step's folder; ``fault`` says why a run can't resume from it, empty if it can."""

    step: int
    folder: Path
    fault: str = ""


def saved_steps(root: Path, with_queue: bool = False) -> list[Saved]:
    """Return the steps in a run's folder in their order; sizes are verified, and checksums when the engine loads.

    Args:
        with_queue: whether a complete step has verl's queue of prompts, which async trainers save last.
    """
    numbers = {path: path.name.removeprefix("global_step_") for path in root.glob("global_step_*")}
    steps = {int(number): path for path, number in numbers.items() if number.isdigit()}
    return [Saved(step, path, _fault(path, with_queue)) for step, path in sorted(steps.items())]


def latest(found: Sequence[Saved]) -> Saved | None:
    """Return the last complete checkpoint."""
    return next((saved for saved in reversed(found) if not saved.fault), None)


def _fault(folder: Path, with_queue: bool) -> str:
    roles = {path.name.partition(".")[0] for path in folder.iterdir()} & {"actor", "critic"}
    for role in sorted({"actor", *roles}):
        if not (folder / role / MANIFEST).is_file():
            return f"{role} was not saved to its end"
        try:
            verify_files(folder / role, checksums=False)
        except CheckpointError as error:
            return str(error)
    # verl writes data.pt in place, so a killed save leaves a part of it.
    if not zipfile.is_zipfile(folder / "data.pt"):
        return "data.pt was not saved to its end"
    # Without the queue verl resumes and drops the prompts in flight.
    return f"{_QUEUE} was not saved to its end" if with_queue and not (folder / _QUEUE).is_dir() else ""
