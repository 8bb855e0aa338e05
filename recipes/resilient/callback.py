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
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from ...engine.checkpoint.atomic_folder import complete_dir, partial_dir
from ...engine.checkpoint.saves import name_as_latest
from ...engine.compat.verl_names import checkpoint_callback
from ...engine.survivors import TASK, write_message
from .command import FOLDER, NOTICE, complete_steps

__all__ = ["SaveBeforeTheEnd", "save_step"]

_ANSWER_SECONDS, _WRITE_SECONDS, _POLL_SECONDS = 20.0, 900.0, 0.2


class SaveBeforeTheEnd(checkpoint_callback()):  # type: ignore[misc]
    """Save each step once the notice exists; with ``engine.survivors_folder`` also when ``fit`` raises or hangs."""

    def __init__(self, config: Any = None):
        super().__init__(config)
        self._root = Path(config.trainer.default_local_dir)
        # The last complete step, the updates of each role up to it in this attempt, and its data.pt.
        self._last: tuple[int, dict[str, int], bytes] | None = None
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

        def fit(trainer: Any, *args: Any) -> Any:
            begun, step = trainer.global_steps, trainer.step
            first = max(begun + 1, self.config.trainer.critic_warmup)  # step that updates the actor

            def noted_step(*args: Any) -> Any:
                result = step(*args)
                data = io.BytesIO()
                torch.save(trainer.train_dataloader.state_dict(), data)  # as verl's trainers write data.pt
                updates = {"actor": max(0, trainer.global_steps - first + 1)}
                if trainer.use_critic:
                    updates["critic"] = trainer.global_steps - begun
                self._last = trainer.global_steps, updates, data.getvalue()
                return result

            trainer.step = noted_step
            try:
                return plain(trainer, *args)
            except BaseException:
                self._save()
                raise

        PPOTrainer.fit = fit

    def _save(self) -> None:
        """Save the last complete step unless it is saved; print the outcome."""
        with self._saving:
            last, self._last = self._last, None
            if last is None or last[0] in complete_steps(self._root):
                return
            try:
                outcome = f"the living ranks have saved step {last[0]} in {save_step(self._root, *last)}"
            except (RuntimeError, OSError) as error:
                outcome = f"step {last[0]} is not saved: {error}"
            print(f"[resilient] {outcome}", flush=True)


def save_step(root: Path, step: int, updates: Mapping[str, int], data: bytes) -> Path:
    """Save a step with the living ranks; return the checkpoint's folder. Raises ``RuntimeError`` if they can't.

    ``updates`` has the number of updates of each role (``actor``, ``critic``) in this attempt. ``data`` is ``data.pt``.
    """
    messages, folder, id = root / FOLDER, root / f"global_step_{step}", uuid4().hex
    partials = [partial_dir(folder / role) for role in updates]

    def found(role: str, ending: str) -> set[tuple[int, ...]]:
        """Return positions in a replica, each with the number of its ranks."""
        files = messages.glob(f"{id}-{role}-*.{ending}")
        return {tuple(map(int, path.stem.split("-")[2:])) for path in files}

    def lacking(role: str) -> list[int] | None:
        """Return the positions that no rank has claimed; None if no rank has claimed any."""
        claims = found(role, "claim")
        return sorted(set(range(max(claims)[1])) - {position for position, _ in claims}) if claims else None

    try:
        for partial in partials:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        write_message(messages, TASK, {"id": id, "step": step, "updates": dict(updates), "folder": str(folder)})
        _wait(lambda: all(lacking(role) == [] for role in updates), _ANSWER_SECONDS)
        (messages / TASK).unlink()
        # Also if shards lack, because a rank that still writes would bring back a folder that is removed.
        if not _wait(lambda: all(found(r, "claim") == found(r, "json") for r in updates), _WRITE_SECONDS):
            raise RuntimeError(f"ranks did not write their shards within {_WRITE_SECONDS:g} s")
        for role, made in updates.items():
            if (missing := lacking(role)) != []:
                shards = f"the shards of the {role}'s ranks {missing} of a replica" if missing else f"the {role}"
                raise RuntimeError(f"no living rank holds {shards} after {made} updates")
        files: dict[str, dict[str, Any]] = {role: {} for role in updates}
        for role, facts in files.items():
            for path in messages.glob(f"{id}-{role}-*.json"):
                answer = json.loads(path.read_text())
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                facts.update(answer["files"])
        for role, facts in files.items():
            complete_dir(folder / role, facts)
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
