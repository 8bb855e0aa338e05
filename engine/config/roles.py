"""verl's config dataclasses of the engine and its roles, and Hydra's targets that build them.

Instantiating or unpickling ``EPFSDP2EngineConfig`` registers the engine with verl, because a worker may get its config
and nothing else of this package.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from hydra.errors import CompactHydraException
from hydra.utils import instantiate
from verl.utils.device import get_device_name, is_support_ipc
from verl.workers.config.actor import ActorConfig
from verl.workers.config.critic import CriticConfig
from verl.workers.config.engine import EngineConfig, EngineRouterReplayConfig

from ..cleanup import report_leftovers
from ..errors import SettingError
from ..preflight.model import check_model_path
from ..preflight.old_log_probs import SETTING as OLD_LOG_PROBS
from ..preflight.old_log_probs import why_computed
from ..preflight.resume import check_background_saves
from ..preflight.rollout import max_model_len, rows_held_in, tensor_parallel_size
from ..preflight.run import check_run, check_training
from .settings import EngineSettings, check_settings
from .values import STRATEGY
from .verl_keys import ROLES, Role, RoleEngine, check_role_keys, engine_of_role, known_settings, renamed

__all__ = [
    "DriverError",
    "EPFSDP2ActorConfig",
    "EPFSDP2CriticConfig",
    "EPFSDP2EngineConfig",
    "actor_config",
    "critic_config",
    "engine_config",
]

logger = logging.getLogger("epfsdp2")


class DriverError(SettingError, CompactHydraException):
    """A ``SettingError`` that Hydra prints as one paragraph, without a traceback."""

    def __repr__(self) -> str:
        # Hydra quotes errors of a config's _target_ by their repr.
        return str(self)


@contextmanager
def _on_the_driver(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn a ``SettingError`` into a ``DriverError``, with the user's spelling if the setting was given for a role."""
    try:
        yield
    except SettingError as error:
        named = renamed(error, names or {})
        raise DriverError(named.setting, named.value, named.rule, named.works) from error


@dataclass
class EPFSDP2EngineConfig(EngineSettings, EngineConfig):
    """The engine's settings (``EngineSettings``), the fields that verl sets of any engine, and facts of the role."""

    _mutable_fields = EngineConfig._mutable_fields | {"ulysses_sequence_parallel_size"}

    router_replay: EngineRouterReplayConfig = field(default_factory=EngineRouterReplayConfig)
    # Batch that the plan is made for, by the actor's settings; 0 if unknown.
    _sequences_per_update: int = 0
    _longest_sequence: int = 0
    # Name of the actor's rollout, because its loader determines the names of sent weights; "" for the default one.
    _rollout: str = ""
    # Rollout quantisation with per-row scales ("fp8", "int8"), or "".
    _rollout_channels: str = ""
    # Workers that share each tensor of the actor's rollout, if the roles compute as they do (rollout_bitwise).
    _rollout_tp: int = 1
    # Length in tokens by which the actor's rollout chooses rotations at its start, if it does.
    _max_model_len: int | None = None
    # If an actor's updates give old log-probs: the sequences of a batch, and how verl averages their entropies.
    _one_update: dict[str, Any] | None = None
    # Whether several roles share these settings, and the driver has checked whether their models have experts.
    _of_a_role: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_settings(self)
        if not isinstance(self.router_replay, EngineRouterReplayConfig):
            entries = {key: value for key, value in self.router_replay.items() if key != "_target_"}
            self.__dict__["router_replay"] = EngineRouterReplayConfig(**entries)
        _register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A critic's worker receives the config that the driver made.
        self.__dict__.update(state)
        _register()


def _register() -> None:
    from ..integration import language_model, shims, value_model  # noqa: F401  (engines register themselves with verl)

    shims.install()  # also where no engine is built: the driver of sft_trainer_ray logs


def engine_config(**settings: Any) -> EPFSDP2EngineConfig:
    """Build the engine's config from the keys under ``engine.``; Hydra's ``_target_`` of that node.

    Raises:
        DriverError: for an unknown key, with the nearest known one, or a value that is wrong for every model.
    """
    notes: list[str] = []
    with _on_the_driver():
        config = EPFSDP2EngineConfig(**known_settings("engine", settings, notes))
    _log(notes)
    return config


@dataclass
class EPFSDP2ActorConfig(ActorConfig):
    """Actor, and with ``forward_only`` the reference policy: verl's settings, and the role's engine.

    ``rollout`` has the rollout settings that the driver checks together with the engine's (``preflight``).
    ``reference`` has the engine's settings of the reference policy, ``names`` the user's spelling of this role's.
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
        facts = {
            "forward_only": self.forward_only,
            "_of_a_role": True,
            "_max_model_len": max_model_len(self.rollout),
            "_rollout": self.rollout.get("name") or "",
            "_rollout_channels": rows_held_in(self.rollout),
            "_rollout_tp": tensor_parallel_size(self.rollout) if self.engine.rollout_bitwise else 1,
        }
        lengths = [self.rollout.get(f"max_{part}_length") for part in ("prompt", "response")]
        if all(lengths):
            facts["_sequences_per_update"] = self.ppo_mini_batch_size * self.rollout_n
            facts["_longest_sequence"] = sum(lengths)
        if self.engine.old_log_probs_from_update and not self.forward_only:
            if why := why_computed(self.engine, self, self.rollout):
                _log([f"{OLD_LOG_PROBS}=True: old log-probs are computed before updates because of {why}"])
            else:
                averaged = {"loss_agg_mode": self.loss_agg_mode, "loss_scale_factor": self.loss_scale_factor}
                facts["_one_update"] = {"sequences": self.ppo_mini_batch_size * self.rollout_n, "averaged": averaged}
        # A config for each role, because verl writes batch sizes into it.
        self.engine = replace(self.engine, **facts)

    @property
    def ulysses_sequence_parallel_size(self) -> int:
        """The engine's, which verl reads here when it checks batch sizes."""
        return self.engine.ulysses_sequence_parallel_size

    def validate(self, n_gpus: int, train_batch_size: int, model_config: dict | None = None) -> None:
        """Check the whole run on the driver, before Ray starts; a ``DriverError`` as ``preflight.check_run`` raises."""
        super().validate(n_gpus, train_batch_size, model_config or {})
        with _on_the_driver(self.names):
            if self.use_fused_kernels and not (model_config or {}).get("use_fused_kernels"):
                name, works = (f"actor_rollout_ref.{node}.use_fused_kernels" for node in ("actor", "model"))
                raise SettingError(name, True, "verl's engines read the model's setting alone.", f"{works}=True")
            role: dict[str, Any] = {"checkpoint": self.checkpoint, "optim": self.optim, "device": get_device_name()}
            check_run(self.engine, n_gpus, model_config or {}, self.rollout, ipc=is_support_ipc(), **role)
        if self.reference is not None:
            with _on_the_driver(self.reference.names):
                channels = {"_rollout_channels": self.engine._rollout_channels}
                engine = EPFSDP2EngineConfig(**self.reference.values, **channels)
                if self.reference.names:  # without settings of its own it is the actor's, which is checked
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
        of_rollout = {"rollout_quantization_aware": False, "rollout_bitwise": False}
        self.engine = replace(self.engine, forward_only=False, **of_rollout, _of_a_role=True)

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """Check the critic on the driver; a ``DriverError`` as ``preflight.check_training`` raises."""
        super().validate(n_gpus, train_batch_size)
        with _on_the_driver(self.names):
            role: dict[str, Any] = {"checkpoint": self.checkpoint, "optim": self.optim, "device": get_device_name()}
            check_training(self.engine, n_gpus, self.model, setting="critic.model", **role)


def actor_config(**settings: Any) -> EPFSDP2ActorConfig:
    """Build the actor's config, or the reference policy's; Hydra's ``_target_``, with ``_recursive_: false``.

    Raises:
        DriverError: for a setting of the role that is unknown, wrong, or contradicts another of its spellings.
    """
    with _on_the_driver():
        check_background_saves(settings)
        if (reference := settings.pop("reference", None)) is not None:
            reference = dict(reference)
            if reference.get("strategy") == settings.get("strategy"):
                reference["strategy"] = STRATEGY  # it follows the actor's, which is logged already
            settings["reference"] = engine_of_role(ROLES["ref"], reference)
            _log(settings["reference"].notes)
    return _role_config(EPFSDP2ActorConfig, ROLES["ref" if settings.get("forward_only") else "actor"], settings)


def critic_config(**settings: Any) -> EPFSDP2CriticConfig:
    """Build the critic's config; Hydra's ``_target_`` of ``critic``, with ``_recursive_: false``.

    Raises:
        DriverError: if its model is missing; besides, as ``actor_config``.
    """
    with _on_the_driver():
        check_model_path(settings["model"], "critic.model")  # now, because building critic.model would ask the hub
    return _role_config(EPFSDP2CriticConfig, ROLES["critic"], settings)


def _role_config(kind: type, role: Role, settings: dict[str, Any]) -> Any:
    with _on_the_driver():
        merged = engine_of_role(role, settings)
        notes = check_role_keys(role, settings, {f.name for f in fields(kind)})
    with _on_the_driver(merged.names):
        engine = EPFSDP2EngineConfig(**merged.values)
    for key, value in settings.items():
        if isinstance(value, Mapping):
            settings[key] = instantiate(value, _convert_="partial")
    _log([*merged.notes, *notes])
    return kind(engine=engine, names=merged.names, **settings)


def _log(notes: Iterable[str]) -> None:
    """Log each line once in a process of rank 0: at a config's construction, because not every trainer validates it."""
    if os.environ.get("RANK", "0") == "0":
        for line in notes:
            _log_once(line)


@cache
def _log_once(line: str) -> None:
    logger.warning("epfsdp2: %s", line)
