"""Saves at the end of the current step when a file appears, since a machine that is preempted ends soon after.

verl 0.9.1 saves before a known end of a machine's time (``trainer.esi_redundant_time``) in its old and its fully-async
trainers, not in those of ``trainer.use_v1``, and in none at a signal. The latter make
``trainer.checkpoint_callback_class`` with their config and read ``config.trainer.save_freq`` at the end of each step: a
callback that watches for the file makes it 1. ``tests/recipes/test_resilient.py`` fails when upstream saves itself.
"""

import threading
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from .checkpoints import NOTICE

__all__ = ["SaveOnNotice"]

_LOOK_SECONDS = 0.5


class SaveOnNotice(CheckpointCallback):
    """Watches for ``<trainer.default_local_dir>/save_now`` on the trainer's process."""

    def __init__(self, config: Any = None):
        super().__init__(config)
        self._notice = Path(config.trainer.default_local_dir) / NOTICE
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, name="save on notice", daemon=True)
        self._watch.start()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self._tick()

    def _tick(self) -> None:
        if self._notice.exists():
            self.config.trainer.save_freq = 1

    def stop(self) -> None:
        """End the watch."""
        self._ended.set()
        self._watch.join()
