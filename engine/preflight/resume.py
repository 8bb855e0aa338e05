"""Checks of a role's checkpoint settings, and of the checkpoint that a run resumes from.

verl reads a checkpoint after its workers have built their models. A driver that sees the folder checks it earlier.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.atomic_folder import MANIFEST, CheckpointError, partial_dir
from ..checkpoint.saves import latest_step
from ..checkpoint.state import KNOWN_CONTENTS
from ..checkpoint.stored_shards import check_contents
from ..config.values import ACTOR_MODEL, get_setting, plain
from ..errors import SettingError

__all__ = ["CHECKPOINTS", "check_background_saves", "check_checkpoint", "check_resume"]

# Config paths of the checkpoint's node, by the model's.
CHECKPOINTS = {
    ACTOR_MODEL: "actor_rollout_ref.actor.checkpoint",
    "critic.model": "critic.checkpoint",
    "model": "checkpoint",
}


def check_checkpoint(checkpoint: Mapping[str, Any], model: str, with_base: bool = False) -> None:
    """Check that the contents to save and load exist, and that a critic does not save in the background.

    Args:
        model: config path of the role's model.
        with_base: whether the frozen weights of a run with adapters are saved too.
    """
    node = CHECKPOINTS[model]
    if checkpoint.get("save_lora_only") and with_base:
        rule, name = "contradicts engine.save_frozen_base=True.", f"{node}.save_lora_only"
        raise SettingError(name, True, rule, "engine.save_frozen_base=False, which saves adapters alone")
    for key in ("save_contents", "load_contents"):
        name, contents = f"{node}.{key}", plain(checkpoint.get(key) or ())
        wanted = {contents} if isinstance(contents, str) else set(contents)
        unknown = sorted(str(entry) for entry in wanted - KNOWN_CONTENTS)
        if unknown:
            rule = f"there is no {' and no '.join(unknown)} in a checkpoint."
            works = f"{name}=[{','.join(sorted(KNOWN_CONTENTS))}], or some of them"
            raise SettingError(name, contents, rule, works)
        if isinstance(contents, str):
            raise SettingError(name, contents, "is a list.", f"{name}=[{contents}]")
    if checkpoint.get("async_save") and model == "critic.model":
        name = f"{node}.async_save"
        rule = "a step is complete, and named the latest, when the actor's part is; the critic's has to be there then."
        raise SettingError(name, True, rule, f"{name}=False")


def check_background_saves(actor: Mapping[str, Any]) -> None:
    """Refuse background saves with trainers that don't let the engine name the latest checkpoint.

    Fully-async names a step before its save has ended. One-step-off does not call the engine after its last save, so
    the last checkpoint would never be named.

    Raises:
        SettingError: the actor has ``checkpoint.async_save`` in one of these trainers.
    """
    if get_setting(actor, "checkpoint.async_save") and get_setting(actor, "rollout.separate_nodes") is not None:
        setting = "actor_rollout_ref.actor.checkpoint.async_save"
        rule = "is for main_ppo: one-step-off and fully-async don't name the latest checkpoint when it is complete."
        raise SettingError(setting, True, rule, f"{setting}=False")


def check_resume(trainer: Mapping[str, Any], role: str, contents: Collection[str], model: str) -> None:
    """Check that a role can resume from the checkpoint that verl's trainer chooses, if there is one.

    Args:
        trainer: verl's ``trainer.resume_mode``, ``resume_from_path`` and ``default_local_dir`` as ``mode``,
            ``from_path`` and ``folder``.
        role: ``actor`` or ``critic``, the name of its folder.
        contents: the role's ``load_contents``.

    Raises:
        SettingError: the checkpoint is not complete, or lacks some of ``contents``.
    """
    step = _resumed_step(trainer)
    if step is None or not (step / role).is_dir() or (partial_dir(step / role) / MANIFEST).is_file():
        return
    try:
        if not (step / role / MANIFEST).is_file():
            raise CheckpointError(f"{step / role} holds no {MANIFEST}: it is no complete checkpoint of this engine.")
        check_contents(step / role, plain(contents), CHECKPOINTS[model])
    except CheckpointError as error:
        works = "trainer.resume_mode=resume_path with a complete checkpoint as trainer.resume_from_path, or disable"
        raise SettingError("trainer.resume_mode", trainer["mode"], str(error), works) from error


def _resumed_step(trainer: Mapping[str, Any]) -> Path | None:
    """Return the folder that verl's trainers resume from (verl 0.9.1, ``trainer/ppo/v1/trainer_base.py``)."""
    if trainer.get("mode") == "auto" and trainer.get("folder"):
        number = latest_step(Path(trainer["folder"]))
        return None if number is None else Path(trainer["folder"]) / f"global_step_{number}"
    if trainer.get("mode") == "resume_path" and trainer.get("from_path"):
        return Path(trainer["from_path"])
    return None
