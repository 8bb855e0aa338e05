"""The engine's settings and those of its roles, as verl-style dataclasses that check themselves.

``settings.py`` lists the engine's settings. Whoever instantiates or unpickles ``EPFSDP2EngineConfig``
also registers the engine with verl, so that a worker that got its config has its engine.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hydra.errors import CompactHydraException
from hydra.utils import instantiate
from verl.utils.device import get_device_name, is_support_ipc
from verl.workers.config.actor import ActorConfig
from verl.workers.config.critic import CriticConfig
from verl.workers.config.engine import EngineConfig, EngineRouterReplayConfig

from ..cleanup import report_leftovers
from ..errors import SettingError
from ..preflight.model_facts import check_model_path
from ..preflight.positions import max_model_len
from ..preflight.resume import check_background_saves
from ..preflight.rounding import rows_held_in
from ..preflight.run import check_run, check_training
from .rules import REPLAY_MODES, one_of
from .settings import EngineSettings, check_settings
from .values import STRATEGY
from .verl_keys import (
    ROLES,
    SET_BY_VERL,
    Role,
    RoleEngine,
    check_role_keys,
    engine_of_role,
    renamed,
    tell,
    without_verls_keys,
)

__all__ = [
    "STRATEGY",
    "DriverError",
    "EPFSDP2ActorConfig",
    "EPFSDP2CriticConfig",
    "EPFSDP2EngineConfig",
    "actor_config",
    "critic_config",
    "engine_config",
    "engine_settings",
]


class DriverError(SettingError, CompactHydraException):
    """A ``SettingError`` that Hydra prints as the paragraph it is, without a traceback."""

    def __repr__(self) -> str:
        # Hydra quotes errors of a config's _target_ by their repr.
        return str(self)

    @classmethod
    def of(cls, error: SettingError) -> "DriverError":
        return cls(error.setting, error.value, error.rule, error.works)


@contextmanager
def _on_the_driver(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn a ``SettingError`` into a ``DriverError``, with the name under which the setting was given for a role."""
    try:
        yield
    except SettingError as error:
        raise DriverError.of(renamed(error, names or {})) from error


@dataclass
class EPFSDP2EngineConfig(EngineSettings, EngineConfig):
    """Settings of the EP + FSDP2 engine: those that ``EngineSettings`` declares, and what verl sets of any engine's."""

    _mutable_fields = EngineConfig._mutable_fields | {"ulysses_sequence_parallel_size"}

    router_replay: EngineRouterReplayConfig = field(default_factory=EngineRouterReplayConfig)
    # What the plan is made for; the actor's settings say it, 0 where nothing does.
    _sequences_per_update: int = 0
    _longest_sequence: int = 0
    # Name of the actor's rollout, whose loader decides under which names weights are sent; "" for the default one.
    _rollout: str = ""
    # What it holds weights in where each row has a scale, so that they are rounded so.
    _rollout_channels: str = ""
    # Tokens of a sequence by which the actor's rollout chooses rotations when it starts; None if it does not.
    _max_model_len: int | None = None
    # Whether several roles have these settings, and the driver has seen which of their models have experts.
    _of_a_role: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_settings(self)
        _register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A critic's worker receives the config that the driver made.
        self.__dict__.update(state)
        _register()


def _register() -> None:
    from ..integration import language_model, value_model  # noqa: F401  (they register themselves with verl)


def engine_config(**settings: Any) -> EPFSDP2EngineConfig:
    """Build the engine's config from the keys under ``engine.``; Hydra's ``_target_`` of that node.

    Raises:
        DriverError: for a key that the engine does not have, with the nearest one that it has; or for a value that no
            model could make right.
    """
    notes: list[str] = []
    with _on_the_driver():
        values = without_verls_keys("engine", settings, engine_settings(), notes)
        config = _engine(values)
    _tell(notes)
    return config


def _engine(values: Mapping[str, Any]) -> EPFSDP2EngineConfig:
    values = dict(values)
    replay = values.get("router_replay")
    if isinstance(replay, Mapping) and not isinstance(replay, EngineRouterReplayConfig):
        known = {f.name for f in fields(EngineRouterReplayConfig)}
        without_verls_keys("engine.router_replay", replay, known, [])
        one_of(REPLAY_MODES, "disabled")("engine.router_replay.mode", replay.get("mode", "disabled"))
        values["router_replay"] = EngineRouterReplayConfig(**{k: v for k, v in replay.items() if k != "_target_"})
    return EPFSDP2EngineConfig(**values)


def engine_settings() -> set[str]:
    """Return the names of the settings under ``engine.`` that a user may give."""
    return {f.name for f in fields(EPFSDP2EngineConfig) if not f.name.startswith("_")} - SET_BY_VERL


@dataclass
class EPFSDP2ActorConfig(ActorConfig):
    """Actor, and with ``forward_only`` the reference policy: verl's settings, and the role's engine.

    ``rollout`` carries the rollout settings that the driver checks together with the engine's (see ``preflight``),
    ``reference`` the engine's settings of the reference policy, ``names`` how the user spelled those of this role.
    """

    strategy: str = STRATEGY
    engine: Any = field(default_factory=EPFSDP2EngineConfig)
    forward_only: bool = False
    grad_clip: float = 1.0
    use_remove_padding: bool = False
    use_rollout_log_probs: bool = False
    rollout: dict[str, Any] = field(default_factory=dict)
    reference: RoleEngine | None = None
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        # A config of its own: verl writes batch sizes into it.
        rollout, channels = self.rollout.get("name") or "", rows_held_in(self.rollout)
        role = {"forward_only": self.forward_only, "_of_a_role": True}
        role["_max_model_len"] = max_model_len(self.rollout)
        self.engine = replace(self.engine, **role, _rollout=rollout, _rollout_channels=channels)
        lengths = [self.rollout.get(f"max_{part}_length") for part in ("prompt", "response")]
        if all(lengths):
            sequences = self.ppo_mini_batch_size * self.rollout_n
            self.engine = replace(self.engine, _sequences_per_update=sequences, _longest_sequence=sum(lengths))

    @property
    def ulysses_sequence_parallel_size(self) -> int:
        """Where verl looks for it when it checks batch sizes."""
        return self.engine.ulysses_sequence_parallel_size

    def validate(self, n_gpus: int, train_batch_size: int, model_config: dict | None = None) -> None:
        """Check what only the whole run knows, on the driver, before Ray starts.

        Raises:
            DriverError: see ``preflight.check_run``.
        """
        super().validate(n_gpus, train_batch_size, model_config or {})
        with _on_the_driver(self.names):
            check_run(
                self.engine,
                n_gpus,
                model_config or {},
                self.rollout,
                checkpoint=self.checkpoint,
                optim=self.optim,
                device=get_device_name(),
                ipc=is_support_ipc(),
            )
        if self.reference is not None:
            # What is given for the reference policy alone; all else is the actor's, and was looked at.
            with _on_the_driver(self.reference.names):
                engine = replace(_engine(self.reference.values), _rollout_channels=self.engine._rollout_channels)
                if self.reference.names:
                    check_training(engine, n_gpus, model_config or {}, device=get_device_name())
        report_leftovers()


@dataclass
class EPFSDP2CriticConfig(CriticConfig):
    """Critic: verl's settings, and the role's engine; ``names`` as the actor's."""

    strategy: str = STRATEGY
    engine: Any = field(default_factory=EPFSDP2EngineConfig)
    grad_clip: float = 1.0
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        # No rollout computes with a critic's weights.
        self.engine = replace(self.engine, forward_only=False, rollout_quantization_aware=False, _of_a_role=True)

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """Check as the actor's config does, for the critic's model.

        Raises:
            DriverError: see ``preflight.check_training``.
        """
        super().validate(n_gpus, train_batch_size)
        with _on_the_driver(self.names):
            check_training(
                self.engine,
                n_gpus,
                self.model,
                checkpoint=self.checkpoint,
                optim=self.optim,
                device=get_device_name(),
                setting="critic.model",
            )


def actor_config(**settings: Any) -> EPFSDP2ActorConfig:
    """Build the actor's config, or the reference policy's; Hydra's ``_target_``, with ``_recursive_: false``.

    Raises:
        DriverError: for a setting of the role that is not there, is wrong, or contradicts another of its spellings.
    """
    with _on_the_driver():
        check_background_saves(settings)
    reference = settings.pop("reference", None)
    role = ROLES["ref" if settings.get("forward_only") else "actor"]
    if reference is not None:
        reference = dict(reference)
        if reference.get("strategy") == settings.get("strategy"):
            reference["strategy"] = STRATEGY  # it follows the actor's, of which one line is enough
        with _on_the_driver():
            settings["reference"] = engine_of_role(ROLES["ref"], reference, engine_settings())
        _tell(settings["reference"].notes)
    return _role_config(EPFSDP2ActorConfig, role, settings)


def critic_config(**settings: Any) -> EPFSDP2CriticConfig:
    """Build the critic's config; Hydra's ``_target_`` of ``critic``, with ``_recursive_: false``.

    Building ``critic.model`` would ask the hub for a path that is not there, so that is looked at first.

    Raises:
        DriverError: if there is no such model; besides, as ``actor_config``.
    """
    with _on_the_driver():
        check_model_path(settings["model"], "critic.model")
    return _role_config(EPFSDP2CriticConfig, ROLES["critic"], settings)


def _role_config(kind: type, role: Role, settings: dict[str, Any]) -> Any:
    with _on_the_driver():
        merged = engine_of_role(role, settings, engine_settings())
        notes = check_role_keys(role, settings, {f.name for f in fields(kind)})
    with _on_the_driver(merged.names):
        engine = _engine(merged.values)
    for key, value in settings.items():
        if isinstance(value, Mapping):
            settings[key] = instantiate(value, _convert_="partial")
    _tell([*merged.notes, *notes])
    return kind(engine=engine, names=merged.names, **settings)


def _tell(notes: Collection[str]) -> None:
    """Log the lines where a config is built, since not every trainer of verl validates it, and not on every rank."""
    if os.environ.get("RANK", "0") == "0":
        tell(notes)
