"""Every setting of the engine, as verl-style dataclasses that check themselves.

``conf/engine/epfsdp2.yaml`` is the same list for Hydra. A setting that means what verl's ``FSDPEngineConfig`` means has
its name. Whoever instantiates or unpickles ``EPFSDP2EngineConfig`` also registers the engine with verl, so that a
worker that got its config has its engine.
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

from .errors import SettingError
from .fsdp.activation_checkpoint import CHECKPOINTING
from .moe.deepep import DISPATCHERS
from .moe.gemm.backends import BACKENDS
from .preflight.model_facts import check_model_path
from .preflight.rollout import report_leftovers
from .preflight.run import check_run, check_training
from .settings.roles import (
    ROLES,
    SET_BY_VERL,
    STRATEGY,
    Role,
    RoleEngine,
    check_role_keys,
    engine_of_role,
    renamed,
    tell,
    without_verls_keys,
)
from .settings.rules import (
    DTYPE,
    EXPERT_PLAN,
    FLAG,
    LOSS_WEIGHT,
    MIXED_PRECISION,
    MODEL_DTYPE,
    PATTERNS,
    POSITIVE,
    POSITIVE_NUMBER,
    REPLAY,
    REPLAY_MODES,
    SEED,
    check_fields,
    is_whole,
    must,
    one_of,
    optional,
    setting,
    whole,
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

_RANKS = whole(1, "is a number of ranks, or -1 for all of them.", "-1", besides=(-1,))
_SHARD_DIM = must(
    lambda value: (isinstance(value, str) and value == "auto") or (is_whole(value) and value in (0, 1)),
    "experts are sharded over ep_fsdp along dim 0 (whole experts), dim 1, or dim 0 where that divides.",
    "auto",
)
_CHUNKS = whole(1, "is the number of parts in which a layer's tokens are dispatched.", "1")
# How weights may be sent; rollout/layout/vllm_layout.py has the ways, and a test compares.
_SYNCED_AS = ("auto", "full", "expert_local", "sliced")
_SYNCS = whole(0, "is the number of syncs that are verified, or -1 for all of them.", "2", besides=(-1,))


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
    """A ``SettingError`` becomes a ``DriverError``, by the name under which the setting was given for a role."""
    try:
        yield
    except SettingError as error:
        raise DriverError.of(renamed(error, names or {})) from error


@dataclass
class EPFSDP2EngineConfig(EngineConfig):
    """Settings of the EP + FSDP2 engine; the YAML says what each of them does.

    ``ep * ep_fsdp * dp_replicate == world``, with ``ep = ep_size``, ``dp_replicate = world / fsdp_size`` (1 where
    ``fsdp_size`` is -1) and ``ep_fsdp`` what is left.
    """

    _mutable_fields = EngineConfig._mutable_fields | {"ulysses_sequence_parallel_size"}

    strategy: str = setting(STRATEGY, must(lambda v: v == STRATEGY, "this engine has one strategy.", STRATEGY))
    ep_size: int = setting(1, POSITIVE)
    expert_shard_dim: Any = setting("auto", _SHARD_DIM)
    expert_plan: dict[str, int] | None = setting(None, EXPERT_PLAN)
    experts_backend: str = setting("auto", one_of(BACKENDS, "auto"))
    fsdp_size: int = setting(-1, _RANKS)
    ulysses_sequence_parallel_size: int = setting(1, POSITIVE)
    model_dtype: str = setting("fp32", MODEL_DTYPE)
    allow_unused_weights: bool = setting(False, FLAG)
    mixed_precision: dict[str, Any] | None = setting(None, MIXED_PRECISION)
    dtype: str = setting("bfloat16", DTYPE)
    fp32_modules: list[str] = setting(None, PATTERNS, factory=list)
    reshard_after_forward: bool = setting(True, FLAG)
    reshard_experts_after_forward: bool | None = setting(None, optional(FLAG))
    activation_checkpointing: str = setting("auto", one_of(("auto", *CHECKPOINTING), "auto"))
    compile_dense: bool = setting(False, FLAG)
    prefetch_depth: int = setting(1, whole(0, "is the number of layers gathered ahead, 0 for none.", "1"))
    dispatch_chunks: int = setting(1, _CHUNKS)
    overlap_shared_experts: bool = setting(False, FLAG)
    dispatcher: str = setting("all_to_all", one_of(DISPATCHERS, "all_to_all"))
    param_offload: bool = setting(False, FLAG)
    optimizer_offload: bool = setting(False, FLAG)
    offload_policy: bool = setting(False, FLAG)
    use_no_sync_for_gradient_accumulation: bool = setting(False, FLAG)
    entropy_from_logits_with_chunking: bool = setting(False, FLAG)
    entropy_from_logits_chunk_size: int = setting(2048, POSITIVE)
    entropy_checkpointing: bool = setting(False, FLAG)
    use_torch_compile: bool = setting(False, FLAG)
    pad_to_length: bool = setting(False, FLAG)
    pad_to_length_bucket: int = setting(1024, POSITIVE)
    seed: int = setting(42, SEED)
    full_determinism: bool = setting(False, FLAG)
    forward_only: bool = setting(False, FLAG)
    router_aux_loss_coef: float = setting(0.0, LOSS_WEIGHT)
    router_z_loss_coef: float = setting(0.0, LOSS_WEIGHT)
    router_metrics: bool = setting(False, FLAG)
    router_replay: EngineRouterReplayConfig = setting(None, REPLAY, factory=EngineRouterReplayConfig)
    rollout_sync: str = setting("auto", one_of(_SYNCED_AS, "auto"))
    rollout_sync_verify: int = setting(2, _SYNCS)
    sync_megabytes: int = setting(2048, POSITIVE)
    sync_timeout_seconds: float = setting(300.0, POSITIVE_NUMBER)
    # What the plan is made for; the actor's settings say it, 0 where nothing does.
    _sequences_per_update: int = 0
    _longest_sequence: int = 0
    # Whether several roles have these settings, and the driver has seen which of their models have experts.
    _of_a_role: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_engine_values(self)
        _register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A critic's worker is handed the config that the driver made.
        self.__dict__.update(state)
        _register()


def _register() -> None:
    from .integration import language_model, value_model  # noqa: F401  (they register themselves with verl)


def check_engine_values(config: EPFSDP2EngineConfig) -> None:
    """Refuse values that no model and no number of ranks could make right.

    Raises:
        SettingError: naming the first such setting.
    """
    check_fields(config)
    # What holds between fields.
    for name, default in (("dispatch_chunks", 1), ("overlap_shared_experts", False), ("dispatcher", "all_to_all")):
        value = getattr(config, name)
        if value == default:
            continue
        if config.dispatcher == "deepep" and name != "dispatcher":
            rule = "is for all_to_all: DeepEP (engine.dispatcher=deepep) sends a layer's tokens at once."
            raise SettingError(f"engine.{name}", value, rule, f"engine.{name}={default}")
        if config.ep_size == 1:
            rule = "no token travels where a rank holds all experts (engine.ep_size=1)."
            raise SettingError(f"engine.{name}", value, rule, f"engine.{name}={default}, or a larger ep_size")
    if config.ulysses_sequence_parallel_size > 1 and config.compile_dense:
        size = config.ulysses_sequence_parallel_size
        rule = (
            "what is compiled may hold no collective, and with sequence parallelism "
            f"(engine.ulysses_sequence_parallel_size={size}) attention does."
        )
        raise SettingError("engine.compile_dense", True, rule, "engine.compile_dense=False")


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
    """Names of the settings under ``engine.`` that a user may give."""
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
        self.engine = replace(self.engine, forward_only=self.forward_only, _of_a_role=True)
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
                engine = _engine(self.reference.values)
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
        self.engine = replace(self.engine, forward_only=False, _of_a_role=True)

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """As the actor's, for the critic's model.

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
