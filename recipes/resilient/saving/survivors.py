"""Have the ranks that are left after a failure write the last step that was complete."""

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from ....engine.checkpoint.atomic_folder import complete_dir, partial_dir
from ....engine.checkpoint.saves import name_as_latest
from ....engine.survivors.messages import ASK, WRITE, answer_name, read, tell

__all__ = ["ENDED", "FOLDER", "NOW", "CantSaveError", "ask_trainer", "save_step"]

FOLDER = "survivors"  # of the messages, beside the checkpoints
NOW, ENDED = "now.json", "ended.json"  # from the recipe that is to end a run, and the trainer's answer
_ANSWER_SECONDS, _WRITE_SECONDS = 20.0, 900.0
_LOOK_SECONDS = 0.2


class CantSaveError(RuntimeError):
    """The ranks that are left do not hold all of a step, or could not write it."""


def save_step(root: Path, step: int, updates: Mapping[str, int], data: bytes) -> Path:
    """Return the folder of the checkpoint that the ranks have written.

    Args:
        root: of the run's checkpoints.
        updates: how many each role (``actor``, ``critic``) has made in this attempt up to this step.
        data: the content of ``data.pt``.

    Raises:
        CantSaveError: with the reason; there is no checkpoint of this step then.
    """
    messages, ask = root / FOLDER, uuid4().hex
    tell(messages, ASK, {"id": ask})
    writers = {
        role: _writers(role, _answers(messages, ask, role, seconds=_ANSWER_SECONDS), made)
        for role, made in updates.items()
    }
    folder = root / f"global_step_{step}"
    partials = {role: partial_dir(folder / role) for role in writers}
    try:
        for partial in partials.values():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        task = {"id": ask, "step": step, "writers": writers, "updates": dict(updates)}
        tell(messages, WRITE, {**task, "folders": {role: str(partial) for role, partial in partials.items()}})
        for role, ranks in writers.items():
            complete_dir(folder / role, _written(messages, ask, role, ranks))
        written = folder / "data.pt.new"
        written.write_bytes(data)
        written.replace(folder / "data.pt")
    except BaseException:
        for partial in partials.values():
            shutil.rmtree(partial, ignore_errors=True)
        raise
    name_as_latest(folder / "actor", step)
    return folder


def ask_trainer(root: Path) -> None:
    """Have the process of a trainer that waits without end save by its ranks; wait until it has."""
    tell(root / FOLDER, NOW, {})
    _wait(lambda: read(root / FOLDER, ENDED) is not None, _ANSWER_SECONDS + _WRITE_SECONDS)


def _answers(messages: Path, ask: str, role: str, seconds: float) -> dict[int, dict[str, Any]]:
    """Return what the ranks of a role answer, by rank: all of them, or those that do within some seconds."""
    answers: dict[int, dict[str, Any]] = {}

    def all_are_there() -> bool:
        for path in messages.glob(answer_name(ask, role, "*")):
            rank = path.stem.rpartition("-")[2]
            if rank.isdecimal() and (said := read(messages, path.name)) is not None:
                answers[int(rank)] = said
        return bool(answers) and len(answers) == next(iter(answers.values()))["ranks"]

    _wait(all_are_there, seconds)
    return answers


def _writers(role: str, answers: Mapping[int, Mapping[str, Any]], updates: int) -> list[int]:
    """Return the ranks that together hold a role's state after so many updates: of each shard the first.

    Raises:
        CantSaveError: a shard is held by none of them.
    """
    if not answers:
        raise CantSaveError(f"no rank of the {role} answers")
    replica = next(iter(answers.values()))["replica"]
    first: dict[int, int] = {}
    for rank in sorted(rank for rank, said in answers.items() if said["updates"] == updates):
        first.setdefault(rank % replica, rank)
    if lacking := sorted(set(range(replica)) - first.keys()):
        there = ", ".join(f"{rank} has {said['updates']}" for rank, said in sorted(answers.items()))
        raise CantSaveError(
            f"no rank that is left holds the shards of the {role}'s ranks {lacking} of a replica after {updates} "
            f"updates (of the ranks that answer: {there}; None: an optimizer was stepping)"
        )
    return sorted(first.values())


def _written(messages: Path, ask: str, role: str, ranks: list[int]) -> dict[str, dict[str, int]]:
    """Wait for these ranks; return size and checksum of each file.

    Raises:
        CantSaveError: one could not write, or has not within 15 minutes.
    """
    said: dict[int, dict[str, Any]] = {}

    def all_have_ended() -> bool:
        for rank in ranks:
            if (answer := read(messages, answer_name(ask, role, rank, has_written=True))) is not None:
                said[rank] = answer
        return len(said) == len(ranks) or any("error" in answer for answer in said.values())

    ended = _wait(all_have_ended, _WRITE_SECONDS)
    if errors := [answer["error"] for answer in said.values() if "error" in answer]:
        raise CantSaveError(errors[0])
    if not ended:
        raise CantSaveError(f"ranks {sorted(set(ranks) - said.keys())} of the {role} did not write their shards")
    return {name: facts for answer in said.values() for name, facts in answer["files"].items()}


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
