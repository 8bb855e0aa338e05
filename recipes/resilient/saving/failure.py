"""Have the ranks that are left save the last complete step when verl's trainer fails; a shim.

verl's trainers have no hook for a failure, and none for the end of a step: ``checkpoint_callback_class`` is told of
saves alone. So the callback wraps ``PPOTrainer.fit``, of which it learns the trainer, and that trainer's ``step``.
``tests/recipes/test_survivors.py`` fails when upstream changes these.
"""

import functools
import io
import threading
from pathlib import Path
from typing import Any

import torch
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from ....engine.survivors.messages import read, tell
from .checkpoints import saved_steps
from .notice import SaveOnNotice
from .survivors import ENDED, FOLDER, NOW, CantSaveError, save_step

__all__ = ["SaveOnFailure"]


class SaveOnFailure(SaveOnNotice):
    """Saves when ``fit`` raises, when the recipe asks for it because the run hangs, and as ``SaveOnNotice`` does."""

    def __init__(self, config: Any = None):
        self._root = Path(config.trainer.default_local_dir)
        self._trainer: Any = None
        self._begun = 0
        self._last: tuple[int, bytes] | None = None  # the last complete step, and the place in the data after it
        self._saving = threading.Lock()
        super().__init__(config)
        self._wrap_fit()

    def _wrap_fit(self) -> None:
        plain = PPOTrainer.fit

        @functools.wraps(plain)
        def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self.follow(trainer)
            try:
                return plain(trainer, *args, **kwargs)
            except BaseException:
                self.save()
                raise

        PPOTrainer.fit = fit

    def follow(self, trainer: Any) -> None:
        """Note the end of each step of a trainer from now on."""
        self._trainer, self._begun, step = trainer, trainer.global_steps, trainer.step

        @functools.wraps(step)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            data = io.BytesIO()
            torch.save(trainer.train_dataloader.state_dict(), data)  # as verl's trainers write data.pt
            self._last = (trainer.global_steps, data.getvalue())
            return result

        trainer.step = noted

    def save(self) -> None:
        """Save the last complete step, unless it is saved; say what became of it."""
        with self._saving:
            last, self._last = self._last, None
            if last is None or last[0] in [saved.step for saved in saved_steps(self._root) if not saved.fault]:
                return
            step, data = last
            try:
                folder = save_step(self._root, step, self._updates(step), data)
                print(f"[resilient] the ranks that are left have saved step {step} in {folder}", flush=True)
            except (CantSaveError, OSError) as error:
                print(f"[resilient] step {step} is not saved: {error}", flush=True)

    def _updates(self, step: int) -> dict[str, int]:
        """Return how often each role was updated since the attempt began."""
        first = max(self._begun + 1, self.config.trainer.critic_warmup)
        made = {"actor": max(0, step - first + 1)}
        return {**made, "critic": step - self._begun} if self._trainer.use_critic else made

    def _tick(self) -> None:
        super()._tick()
        folder = self._root / FOLDER
        if read(folder, NOW) is not None and read(folder, ENDED) is None:
            self.save()
            tell(folder, ENDED, {})
