"""Write the checkpoints of a run, in the foreground or in the background, and remove the oldest."""

import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from . import state as checkpoint
from .background import Background

__all__ = ["CheckpointSaver", "latest_step", "name_as_latest", "remove_old"]

_TRACKER = "latest_checkpointed_iteration.txt"  # verl's


class CheckpointSaver:
    """Writes the checkpoints of one engine, one after another.

    ``save_config`` writes the model's config and its tokenizer into a folder.
    """

    def __init__(self, device: str, save_config: Callable[[Path], None]):
        self._device = device
        self._save_config = save_config
        self._folders: list[Path] = []
        self._background: Background | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self._after_both: Callable[[], None] | None = None

    def save(self, snapshot: checkpoint.Snapshot, folder: Path, max_to_keep: int | None, in_background: bool) -> None:
        """Write a snapshot; collective. In the background, return as soon as it is copied to host memory.

        After a save in the background verl's ``latest_checkpointed_iteration.txt`` is updated here, because verl does
        not wait for it. It names the step when this folder is complete and verl's trainer has written its own part (the
        critic, its place in the data). The next save in the background copies to the same memory, which a save in the
        foreground frees.

        Raises:
            BaseException: the error of the previous save in the background.
        """
        self.trainer_goes_on()
        self.wait()
        if not in_background:
            self._copies = {}
            snapshot.write(folder, self._save_config, self._device)
            self._remove_old(folder, max_to_keep)
            return
        background = self._background = self._background or Background()
        taken, step = snapshot.on_host(self._copies), snapshot.facts["step"]
        self._copies = taken.tensors
        after_both = self._after_both = _on_second_call(partial(self._name_as_latest, folder, step, max_to_keep))

        def job() -> None:
            taken.write(folder, self._save_config, "cpu", background.group)
            after_both()

        background.start(f"saving {folder}", job)

    def trainer_goes_on(self) -> None:
        """Note that verl's trainer, which waits for each call of a worker, has ended its own part of the last save."""
        after_both, self._after_both = self._after_both, None
        if after_both is not None:
            after_both()

    def wait(self) -> None:
        """Wait until the folder of the save in the background is complete; raise its error."""
        if self._background is not None:
            self._background.wait()

    def _name_as_latest(self, folder: Path, step: int, max_to_keep: int | None) -> None:
        if dist.get_rank() == 0:
            name_as_latest(folder, step)
        self._remove_old(folder, max_to_keep)

    def _remove_old(self, newest: Path, max_to_keep: int | None) -> None:
        self._folders = remove_old([*self._folders, newest], max_to_keep)


def _on_second_call(job: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs the job in its second call; two threads may call it."""
    calls = itertools.count(1)  # CPython counts atomically

    def called() -> None:
        if next(calls) == 2:
            job()

    return called


def remove_old(saved: list[Path], max_to_keep: int | None) -> list[Path]:
    """Delete the oldest of ``saved`` (oldest first) beyond ``max_to_keep``; return those that are left.

    verl writes the step to resume from into a file after a save, so during the next save that is the previous
    checkpoint. It is kept, even if it is one too many.
    """
    if not max_to_keep or max_to_keep < 1:
        return saved
    old = [path for path in saved[:-max_to_keep] if not _is_named(path)]
    if dist.get_rank() == 0:
        for path in old:
            shutil.rmtree(path, ignore_errors=True)
    return [path for path in saved if path not in old]


def name_as_latest(folder: Path, step: int) -> None:
    """Make verl resume from this step, as its trainers do after a save that they wait for."""
    tracker = folder.parent.parent / _TRACKER
    written = tracker.with_suffix(".new")
    written.write_text(str(step))
    written.replace(tracker)


def latest_step(root: Path) -> str | None:
    """Return the number of the step that verl would resume from; None if a run's folder names none."""
    tracker = root / _TRACKER
    return tracker.read_text().strip() if tracker.is_file() else None


def _is_named(path: Path) -> bool:
    """Return whether verl would resume from the ``global_step_<n>`` that the folder is, or is in."""
    for step in (path, *path.parents):
        if step.name.startswith("global_step_") and (latest := latest_step(step.parent)) is not None:
            return latest == step.name.removeprefix("global_step_")
    return False
