"""verl's command: what of it can be run again, and the settings that Hydra makes of it."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...engine.config.values import get_setting
from ...engine.config.verl_keys import known_settings
from ...engine.errors import SettingError

__all__ = ["Command"]

_WORKS = "python -m epfsdp2.recipes.resilient -- python -m verl.trainer.main_ppo engine=epfsdp2 ..."
_TOP = re.compile(r"^[A-Za-z_]\w*:")
_SHOWN = 600


@dataclass(frozen=True)
class Command:
    """A trainer's command and the settings that it runs with, resolved.

    Args:
        words: as given after ``--``.
        config: what Hydra composes of it.
    """

    words: tuple[str, ...]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Command":
        """Check a command and let it say its settings, which starts nothing.

        Raises:
            SettingError: it is not one of verl's RL trainers with this engine, Hydra can't compose it, or it gives the
                engine a setting that there is none of.
        """
        said = " ".join(words)[:_SHOWN]
        if not words:
            raise SettingError("resilient", "''", "no command follows the options and --.", _WORKS)
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        if not module.startswith("verl.") or "torch.distributed.run" in said or Path(words[0]).name == "torchrun":
            rule = "is not python -m with one of verl's trainers on Ray, whose settings could be read and changed."
            raise SettingError("resilient", said, f"{rule} (torchrun has --max-restarts itself.)", _WORKS)
        config = _composed(words)
        if "epfsdp2" not in str(get_setting(config, "engine._target_")):
            raise SettingError("resilient", said, "has no engine=epfsdp2, whose checkpoints fit another mesh.", _WORKS)
        # Hydra lets any key of the engine through: the trainer is to refuse it, which here would be an attempt.
        known_settings("engine", get_setting(config, "engine"), [])
        return cls(tuple(words), config)

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting by its dotted name."""
        value = get_setting(self.config, name)
        return default if value is None else value

    def with_overrides(self, overrides: Sequence[str]) -> list[str]:
        return [*self.words, *overrides]

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's ``global_step_<n>``."""
        return Path(str(self.setting("trainer.default_local_dir"))).absolute()

    @property
    def saves_queue(self) -> bool:
        """Whether its trainer saves prompts that are under way with each checkpoint."""
        return self.setting("trainer.v1.trainer_mode", "sync") != "sync"


def _composed(words: Sequence[str]) -> Mapping[str, Any]:
    """Run the command with Hydra's ``--cfg job``, which prints the settings and ends.

    Raises:
        SettingError: with Hydra's own words.
    """
    said = subprocess.run([*words, "--cfg", "job", "--resolve"], capture_output=True, text=True)
    lines = said.stdout.splitlines()
    for start in (number for number, line in enumerate(lines) if _TOP.match(line)):
        try:
            found = yaml.safe_load("\n".join(lines[start:]))
        except yaml.YAMLError:
            continue
        if isinstance(found, dict) and isinstance(found.get("trainer"), dict):
            return found
    why = " ".join((said.stderr or said.stdout).split())[-_SHOWN:] or f"it ended with status {said.returncode}"
    works = "a command that runs without resilient"
    raise SettingError("resilient", " ".join(words)[:_SHOWN], f"its settings can't be composed: {why}.", works)
