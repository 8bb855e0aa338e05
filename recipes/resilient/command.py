"""verl's command and the settings that Hydra composes from it."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...engine.config.values import get_setting
from ...engine.errors import SettingError
from .checkpoints import Saved, saved_steps

__all__ = ["Command"]

_WORKS = "python -m epfsdp2.recipes.resilient -- python -m verl.trainer.main_ppo engine=epfsdp2 ..."
_SHOWN = 600


@dataclass(frozen=True)
class Command:
    """The words after ``--``, and the resolved settings."""

    words: tuple[str, ...]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Command":
        """Check a command and compose its settings, which starts no run.

        Raises ``SettingError`` if it is not one of verl's RL trainers with this engine, or Hydra can't compose it.
        """
        shown = " ".join(words)[:_SHOWN]
        if not words:
            raise SettingError("resilient", "''", "no command follows the options and --.", _WORKS)
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        if not module.startswith("verl.") or Path(words[0]).name == "torchrun":
            rule = "is not python -m with one of verl's trainers on Ray. (torchrun has --max-restarts itself.)"
            raise SettingError("resilient", shown, rule, _WORKS)
        done = subprocess.run([*words, "--cfg", "job", "--resolve"], capture_output=True, text=True)
        config = _printed_settings(done.stdout)
        if config is None:
            why = " ".join((done.stderr or done.stdout).split())[-_SHOWN:] or f"it ended with status {done.returncode}"
            works = "a command that runs without resilient"
            raise SettingError("resilient", shown, f"its settings can't be composed: {why}.", works)
        if "epfsdp2" not in str(get_setting(config, "engine._target_")):
            raise SettingError("resilient", shown, "has no engine=epfsdp2, whose checkpoints fit another mesh.", _WORKS)
        return cls(tuple(words), config)

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting by its dotted name; the default in place of None."""
        value = get_setting(self.config, name)
        return default if value is None else value

    @property
    def root(self) -> Path:
        """The folder of the run's ``global_step_<n>``."""
        return Path(str(self.setting("trainer.default_local_dir"))).absolute()

    @property
    def saves_queue(self) -> bool:
        """Whether checkpoints have the prompts in flight."""
        return self.setting("trainer.v1.trainer_mode", "sync") != "sync"

    def saved_steps(self) -> list[Saved]:
        return saved_steps(self.root, self.saves_queue)


def _printed_settings(output: str) -> Mapping[str, Any] | None:
    """Return the settings that Hydra's ``--cfg job`` prints, after lines of libraries."""
    for start in re.finditer(r"^[A-Za-z_]\w*:", output, re.MULTILINE):
        try:
            found = yaml.safe_load(output[start.start() :])
        except yaml.YAMLError:
            continue
        if isinstance(found, dict) and isinstance(found.get("trainer"), dict):
            return found
    return None
