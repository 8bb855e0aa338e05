"""Write the checkpoints of a run, in the foreground or in the background, and remove the oldest."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from . import state as checkpoint
from .background import Background

__all__ = ["CheckpointSaver"]


class CheckpointSaver:
    """Writes the checkpoints of one engine, one after another.

    Args:
        device: device type of the tensors that the default group's backend sends.
        save_config: writes the model's config and its tokenizer into a folder.
    """

    def __init__(self, device: str, save_config: Callable[[Path], None]):
        self._device = device
        self._save_config = save_config
        self._folders: list[Path] = []
        self._background: Background | None = None

    def save(self, snapshot: checkpoint.Snapshot, folder: Path, max_to_keep: int | None, in_background: bool) -> None:
        """Write a snapshot; collective. In the background, return as soon as it is copied to host memory.

        A save in the background updates verl's ``latest_checkpointed_iteration.txt`` itself, when it is complete.

        Raises:
            BaseException: the error of the previous save in the background.
        """
        self.wait()
        if not in_background:
            self._write(snapshot, folder, max_to_keep, self._device)
            return
        self._background = self._background or Background()
        group = self._background.group
        job = partial(self._write, snapshot.on_host(), folder, max_to_keep, "cpu", group)
        self._background.start(f"saving {folder}", job)

    def wait(self) -> None:
        """Wait for the save in the background to end; raise its error."""
        if self._background is not None:
            self._background.wait()

    def _write(
        self,
        snapshot: checkpoint.Snapshot,
        folder: Path,
        max_to_keep: int | None,
        device: str,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        snapshot.write(folder, self._save_config, device, group)
        if group is not None and dist.get_rank() == 0:
            checkpoint.name_as_latest(folder, snapshot.facts["step"])
        # Only after the newest is complete.
        self._folders = checkpoint.remove_old([*self._folders, folder], max_to_keep)
