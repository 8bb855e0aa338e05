"""Save at SIGTERM and after a failure, from the process of verl's trainer; a shim.

verl 0.9.1 has a hook for neither. Its v1 trainers construct ``trainer.checkpoint_callback_class`` with their config
and read ``config.trainer.save_freq`` after each step, so a thread of the callback can make it 1. To notice a failure
the callback wraps ``PPOTrainer.fit``, and the ``step`` of the trainer that calls it.
``tests/recipes/test_resilient_saves.py`` fails when upstream changes this.
"""

import functools
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
from .checkpoints import ENDED, FOLDER, NOTICE, NOW, saved_steps

__all__ = ["CantSaveError", "SaveBeforeTheEnd", "save_step"]

_ANSWER_SECONDS, _WRITE_SECONDS, _POLL_SECONDS = 20.0, 900.0, 0.2

Answers = dict[tuple[str, int], dict[str, Any]]  # by role and rank


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
        messages = self._root / FOLDER
        while True:
            time.sleep(_POLL_SECONDS)
            if (self._root / NOTICE).exists():
                self.config.trainer.save_freq = 1
            if (messages / NOW).exists() and not (messages / ENDED).exists():
                self._save()
                (messages / ENDED).touch()

    def _wrap_fit(self) -> None:
        plain = PPOTrainer.fit

        @functools.wraps(plain)
        def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._follow(trainer)
            try:
                return plain(trainer, *args, **kwargs)
            except BaseException:
                self._save()
                raise

        PPOTrainer.fit = fit

    def _follow(self, trainer: Any) -> None:
        """Keep the number and ``data.pt`` of each step that completes."""
        self._trainer, self._begun, step = trainer, trainer.global_steps, trainer.step

        @functools.wraps(step)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            data = io.BytesIO()
            torch.save(trainer.train_dataloader.state_dict(), data)  # as verl's trainers write data.pt
            self._last = (trainer.global_steps, data.getvalue())
            return result

        trainer.step = noted

    def _save(self) -> None:
        """Save the last complete step unless it is saved; print the outcome."""
        with self._saving:
            last, self._last = self._last, None
            if last is None or last[0] in [saved.step for saved in saved_steps(self._root) if not saved.fault]:
                return
            step, data = last
            # Updates of each role in this attempt, which ranks count likewise.
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
        root: folder of the run's checkpoints.
        updates: number of updates of each role (``actor``, ``critic``) in this attempt up to this step.
        data: content of ``data.pt``.

    Raises:
        CantSaveError: with the reason; there is no checkpoint of this step then.
    """
    messages, folder = root / FOLDER, root / f"global_step_{step}"

    def all_answered(answers: Answers) -> bool:
        return bool(answers) and len(answers) == len(updates) * next(iter(answers.values()))["ranks"]

    counts = _ask(messages, {}, _ANSWER_SECONDS, all_answered)
    writers = {role: _writers(role, counts, made) for role, made in updates.items()}
    partials = {role: partial_dir(folder / role) for role in updates}
    try:
        for partial in partials.values():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        folders = {role: str(partial) for role, partial in partials.items()}
        task = {"step": step, "writers": writers, "updates": dict(updates), "folders": folders}
        wanted = {(role, rank) for role, ranks in writers.items() for rank in ranks}
        # Also after an error, because a rank that still writes would bring back a folder that is removed.
        written = _ask(messages, task, _WRITE_SECONDS, lambda found: found.keys() == wanted)
        if errors := [answer["error"] for answer in written.values() if "error" in answer]:
            raise CantSaveError(errors[0])
        if silent := sorted(wanted - written.keys()):
            raise CantSaveError(f"these ranks did not write their shards: {silent}")
        for role in updates:
            parts = [answer["files"] for (of, _), answer in written.items() if of == role]
            complete_dir(folder / role, {name: facts for part in parts for name, facts in part.items()})
        (folder / "data.pt.new").write_bytes(data)
        (folder / "data.pt.new").replace(folder / "data.pt")
    except BaseException:
        for partial in partials.values():
            shutil.rmtree(partial, ignore_errors=True)
        raise
    name_as_latest(folder / "actor", step)
    return folder


def _ask(messages: Path, task: dict[str, Any], seconds: float, enough: Callable[[Answers], bool]) -> Answers:
    """Give the ranks a task; return the answers once they are ``enough`` or the time is over."""
    id, deadline = uuid4().hex, time.monotonic() + seconds
    write_message(messages, TASK, {"id": id, **task})
    while True:
        names = [(path, path.stem.split("-")) for path in messages.glob(f"{id}-*.json")]
        answers = {(role, int(rank)): json.loads(path.read_text()) for path, (_, role, rank) in names}
        if enough(answers) or time.monotonic() > deadline:
            return answers
        time.sleep(_POLL_SECONDS)


def _writers(role: str, counts: Answers, updates: int) -> list[int]:
    """Return ranks that together hold a role's state after these updates: the first living one of each shard.

    Raises:
        CantSaveError: no living rank holds some shard.
    """
    made = {rank: answer["updates"] for (of, rank), answer in sorted(counts.items()) if of == role}
    if not made:
        raise CantSaveError(f"no rank of the {role} answers")
    replica = counts[role, next(iter(made))]["replica"]
    first: dict[int, int] = {}
    for rank in (rank for rank, count in made.items() if count == updates):
        first.setdefault(rank % replica, rank)
    if lacking := sorted(set(range(replica)) - first.keys()):
        raise CantSaveError(
            f"no living rank holds the shards of the {role}'s ranks {lacking} of a replica after {updates} updates "
            f"(updates of the living ranks: {made}; None: the optimizer was stepping)"
        )
    return sorted(first.values())
