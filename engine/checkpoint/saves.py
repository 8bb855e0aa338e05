"""The checkpoints that a run writes: one after another, at once or in the background, the oldest removed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from . import state as checkpoint
from .background import Background

__all__ = ["CheckpointSaver"]


class CheckpointSaver:
    """One engine's.

    Args:
        device: type of the device that the default group's collectives take tensors from.
        save_config: writes a model's configuration and its tokenizer into a folder.
    """

    def __init__(self, device: str, save_config: Callable[[Path], None]):
        self._device = device
        self._save_config = save_config
        self._folders: list[Path] = []
        self._background: Background | None = None

    def save(self, snapshot: checkpoint.Snapshot, folder: Path, max_to_keep: int | None, in_background: bool) -> None:
        """Write a snapshot; collective. In the background this returns once it is copied to the host's memory.

        Such a save says itself which checkpoint is the latest, when it is complete.
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
        """Until the save in the background has ended; raises what it raised."""
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
        # The oldest goes when the newest is there.
        self._folders = checkpoint.remove_old([*self._folders, folder], max_to_keep)
