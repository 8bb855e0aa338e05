"""Save at SIGTERM and after a failure, from the process of verl's trainer; a shim.

verl 0.9.1 has a hook for neither. Its v1 trainers construct ``trainer.checkpoint_callback_class`` with their config
and read ``config.trainer.save_freq`` after each step, so a thread of the callback can make it 1. To notice a failure
the callback wraps ``PPOTrainer.fit``, and the ``step`` of the trainer that calls it.
``tests/recipes/test_resilient_saves.py`` fails when upstream changes this.
"""

import io
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from ...engine.checkpoint.atomic_folder import complete_dir, partial_dir
from ...engine.checkpoint.saves import name_as_latest
from ...engine.survivors import TASK, write_message
from .checkpoints import FOLDER, NOTICE, saved_steps

__all__ = ["CantSaveError", "SaveBeforeTheEnd", "save_step"]

_ANSWER_SECONDS, _WRITE_SECONDS, _POLL_SECONDS = 20.0, 900.0, 0.2


class SaveBeforeTheEnd(CheckpointCallback):
    """Save each step once the notice file exists; with ``engine.survivors_folder`` also save when ``fit`` raises.

    The recipe can also ask for the save after a failure, because a run that lost a node may hang.
    """

    def __init__(self, config: Any = None):
        super().__init__(config)
        self._root = Path(config.trainer.default_local_dir)
        self._trainer: Any = None
        self._begun = 0
        self._last: tuple[int, bytes] | None = None  # the last complete step, and its data.pt
        self._saving = threading.Lock()
        if config.engine.get("survivors_folder"):
            self._wrap_fit()
        threading.Thread(target=self._watch, name="save before the end", daemon=True).start()

    def _watch(self) -> None:
        notice = self._root / NOTICE
        while True:
            time.sleep(_POLL_SECONDS)
            if notice.exists() and notice.read_text() == FOLDER:
                self._save()
                notice.unlink(missing_ok=True)
            elif notice.exists():
                self.config.trainer.save_freq = 1

    def _wrap_fit(self) -> None:
        plain = PPOTrainer.fit

        def fit(trainer: Any) -> Any:
            self._trainer, self._begun, step = trainer, trainer.global_steps, trainer.step

            def noted_step(*args: Any) -> Any:
                result = step(*args)
                data = io.BytesIO()
                torch.save(trainer.train_dataloader.state_dict(), data)  # as verl's trainers write data.pt
                self._last = (trainer.global_steps, data.getvalue())
                return result

            trainer.step = noted_step
            try:
                return plain(trainer)
            except BaseException:
                self._save()
                raise

        PPOTrainer.fit = fit

    def _save(self) -> None:
        """Save the last complete step unless it is saved; print the outcome."""
        with self._saving:
            last, self._last = self._last, None
            if last is None or last[0] in [saved.step for saved in saved_steps(self._root) if not saved.fault]:
                return
            step, data = last
            # Updates of each role in this attempt; the ranks count the same.
            first = max(self._begun + 1, self.config.trainer.critic_warmup)
            updates = {"actor": max(0, step - first + 1)}
            if self._trainer.use_critic:
                updates["critic"] = step - self._begun
            try:
                folder = save_step(self._root, step, updates, data)
                print(f"[resilient] the living ranks have saved step {step} in {folder}", flush=True)
            except (CantSaveError, OSError) as error:
                print(f"[resilient] step {step} is not saved: {error}", flush=True)


class CantSaveError(RuntimeError):
    """The living ranks do not hold all of a step, or could not write it."""


def save_step(root: Path, step: int, updates: Mapping[str, int], data: bytes) -> Path:
    """Save a step with the living ranks; return the checkpoint's folder.

    Args:
        updates: number of updates of each role (``actor``, ``critic``) in this attempt up to this step.
        data: content of ``data.pt``.

    Raises:
        CantSaveError: with the reason; there is no checkpoint of this step then.
    """
    messages, folder, id = root / FOLDER, root / f"global_step_{step}", uuid4().hex
    partials = [partial_dir(folder / role) for role in updates]

    def found(role: str, ending: str) -> dict[tuple[int, int], Path]:
        """Return the ranks' files by position in a replica and number of its ranks."""
        files = {path: path.stem.split("-") for path in messages.glob(f"{id}-{role}-*.{ending}")}
        return {(int(position), int(ranks)): path for path, (_, _, position, ranks) in files.items()}

    def all_claimed() -> bool:
        return all((claims := found(role, "claim")) and len(claims) == max(claims)[1] for role in updates)

    def all_written() -> bool:
        return all(found(role, "claim").keys() == found(role, "json").keys() for role in updates)

    try:
        for partial in partials:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        write_message(messages, TASK, {"id": id, "step": step, "updates": dict(updates), "folder": str(folder)})
        _wait(all_claimed, _ANSWER_SECONDS)
        (messages / TASK).unlink()
        # Also if shards lack, because a rank that still writes would bring back a folder that is removed.
        is_written = _wait(all_written, _WRITE_SECONDS)
        for role, made in updates.items():
            claims = found(role, "claim")
            if not claims:
                raise CantSaveError(f"no living rank of the {role} holds a shard after {made} updates")
            if lacking := sorted(set(range(max(claims)[1])) - {position for position, _ in claims}):
                raise CantSaveError(
                    f"no living rank holds the shards of the {role}'s ranks {lacking} of a replica after {made} updates"
                )
        if not is_written:
            raise CantSaveError(f"ranks did not write their shards within {_WRITE_SECONDS:g} s")
        answers = {role: [json.loads(path.read_text()) for path in found(role, "json").values()] for role in updates}
        if errors := [answer["error"] for part in answers.values() for answer in part if "error" in answer]:
            raise CantSaveError(errors[0])
        for role, part in answers.items():
            complete_dir(folder / role, {name: facts for answer in part for name, facts in answer["files"].items()})
        (folder / "data.pt").write_bytes(data)
    except BaseException:
        for partial in partials:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    name_as_latest(folder / "actor", step)
    return folder


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return holds
