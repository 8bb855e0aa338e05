"""Every setting of the engine, as verl-style dataclasses that check themselves.

``conf/engine/epfsdp2.yaml`` is the same list for Hydra. A setting that means what verl's ``FSDPEngineConfig`` means has
its name. Whoever instantiates or unpickles ``EPFSDP2EngineConfig`` also registers the engine with verl, so that a
worker that got its config has its engine.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hydra.errors import CompactHydraException
from hydra.utils import instantiate
from verl.utils.device import get_device_name, is_support_ipc
from verl.workers.config.actor import ActorConfig
from verl.workers.config.critic import CriticConfig
from verl.workers.config.engine import EngineConfig, EngineRouterReplayConfig

from ..rollout import housekeeping
from ..rollout.placement import WANTED
from .checkpointing import CHECKPOINTING
from .errors import SettingError
from .experts.backends import BACKENDS
from .experts.deepep import DISPATCHERS
from .model_facts import DTYPES, check_model_path
from .preflight import check_run, check_training

__all__ = [
    "STRATEGY",
    "EPFSDP2ActorConfig",
    "EPFSDP2CriticConfig",
    "EPFSDP2EngineConfig",
    "critic_config",
    "engine_config",
]

STRATEGY = "epfsdp2"
_REPLAY_MODES = ("disabled", "R2", "R3")
_PRECISION_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")
# Fields of EngineConfig that verl's trainer fills in from the actor's and the model's settings.
_SET_BY_VERL = {
    "use_dynamic_bsz",
    "max_token_len_per_gpu",
    "micro_batch_size_per_gpu",
    "infer_max_token_len_per_gpu",
    "infer_micro_batch_size_per_gpu",
    "use_fused_kernels",
    "use_remove_padding",
}


class DriverError(SettingError, CompactHydraException):
    """A ``SettingError`` that Hydra prints as the paragraph it is, without a traceback."""

    def __repr__(self) -> str:
        # Hydra quotes errors of a config's _target_ by their repr.
        return str(self)

    @classmethod
    def of(cls, error: SettingError) -> "DriverError":
        return cls(error.setting, error.value, error.rule, error.works)


@dataclass
class EPFSDP2EngineConfig(EngineConfig):
    """Settings of the EP + FSDP2 engine; the YAML says what each of them does.

    ``ep * ep_fsdp * dp_replicate == world``, with ``ep = ep_size``, ``dp_replicate = world / fsdp_size`` (1 where
    ``fsdp_size`` is -1) and ``ep_fsdp`` what is left.
    """

    _mutable_fields = EngineConfig._mutable_fields | {"ulysses_sequence_parallel_size"}

    strategy: str = STRATEGY
    ep_size: int = 1
    expert_shard_dim: Any = "auto"
    expert_plan: dict[str, int] | None = None
    experts_backend: str = "auto"
    fsdp_size: int = -1
    ulysses_sequence_parallel_size: int = 1
    model_dtype: str = "fp32"
    allow_unused_weights: bool = False
    mixed_precision: dict[str, Any] | None = None
    fp32_modules: list[str] = field(default_factory=list)
    reshard_after_forward: bool = True
    reshard_experts_after_forward: bool | None = None
    activation_checkpointing: str = "auto"
    compile_dense: bool = False
    prefetch_depth: int = 1
    dispatch_chunks: int = 1
    overlap_shared_experts: bool = False
    dispatcher: str = "all_to_all"
    offload_policy: bool = False
    use_no_sync_for_gradient_accumulation: bool = False
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = False
    use_torch_compile: bool = False
    pad_to_length: bool = False
    pad_to_length_bucket: int = 1024
    router_aux_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0
    router_metrics: bool = False
    rollout_sync: str = "auto"
    rollout_sync_verify: int = 2
    sync_megabytes: int = 2048
    sync_timeout_seconds: float = 300.0
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
    from . import actor, critic  # noqa: F401  (they register themselves with verl)


def check_engine_values(config: EPFSDP2EngineConfig) -> None:
    """Refuse values that no model and no number of ranks could make right.

    Raises:
        SettingError: naming the first such setting.
    """
    if config.strategy != STRATEGY:
        raise SettingError("engine.strategy", config.strategy, "this engine has one strategy.", STRATEGY)
    for name in ("ep_size", "ulysses_sequence_parallel_size"):
        value = getattr(config, name)
        if not _is_whole(value) or value < 1:
            raise SettingError(f"engine.{name}", value, "has to be a positive whole number.", f"engine.{name}=1")
    if config.expert_shard_dim != "auto" and not (
        _is_whole(config.expert_shard_dim) and 0 <= config.expert_shard_dim < 2
    ):
        raise SettingError(
            "engine.expert_shard_dim",
            config.expert_shard_dim,
            "experts are sharded over ep_fsdp along dim 0 (whole experts), dim 1, or dim 0 where that divides.",
            "engine.expert_shard_dim=auto",
        )
    if not _is_whole(config.fsdp_size) or (config.fsdp_size != -1 and config.fsdp_size < 1):
        raise SettingError(
            "engine.fsdp_size", config.fsdp_size, "is a number of ranks, or -1 for all of them.", "engine.fsdp_size=-1"
        )
    _check_dtype("model_dtype", config.model_dtype)
    _check_dtype("dtype", config.dtype)
    precision = config.mixed_precision or {}
    if not isinstance(precision, Mapping):
        raise SettingError(
            "engine.mixed_precision", precision, "is null or a mapping.", "engine.mixed_precision={param_dtype:bf16}"
        )
    unknown = sorted(set(precision) - set(_PRECISION_KEYS))
    if unknown:
        raise SettingError(
            f"engine.mixed_precision.{unknown[0]}",
            precision[unknown[0]],
            "there is no such key.",
            f"keys {', '.join(_PRECISION_KEYS)}",
        )
    for key, value in precision.items():
        _check_dtype(f"mixed_precision.{key}", value)
    buffers = precision.get("buffer_dtype", "fp32")
    if DTYPES[buffers].itemsize != 4:
        raise SettingError(
            "engine.mixed_precision.buffer_dtype",
            buffers,
            "buffers are never cast: they stay float32.",
            "engine.mixed_precision.buffer_dtype=fp32, or leave the key out",
        )
    if not _is_whole(config.prefetch_depth) or config.prefetch_depth < 0:
        raise SettingError(
            "engine.prefetch_depth",
            config.prefetch_depth,
            "is the number of layers gathered ahead, 0 for none.",
            "engine.prefetch_depth=1",
        )
    flags = (
        "reshard_after_forward",
        "compile_dense",
        "allow_unused_weights",
        "router_metrics",
        "overlap_shared_experts",
    )
    for name in flags:
        _check_flag(f"engine.{name}", getattr(config, name))
    if not _is_whole(config.dispatch_chunks) or config.dispatch_chunks < 1:
        rule = "is the number of parts in which a layer's tokens are dispatched."
        raise SettingError("engine.dispatch_chunks", config.dispatch_chunks, rule, "engine.dispatch_chunks=1")
    if config.dispatcher not in DISPATCHERS:
        rule = f"is one of {', '.join(DISPATCHERS)}."
        raise SettingError("engine.dispatcher", config.dispatcher, rule, "engine.dispatcher=all_to_all")
    for name, default in (("dispatch_chunks", 1), ("overlap_shared_experts", False), ("dispatcher", "all_to_all")):
        if config.dispatcher == "deepep" and name != "dispatcher" and getattr(config, name) != default:
            rule = "is for all_to_all: DeepEP (engine.dispatcher=deepep) sends a layer's tokens at once."
            raise SettingError(f"engine.{name}", getattr(config, name), rule, f"engine.{name}={default}")
        if config.ep_size == 1 and getattr(config, name) != default:
            rule = "no token travels where a rank holds all experts (engine.ep_size=1)."
            raise SettingError(
                f"engine.{name}", getattr(config, name), rule, f"engine.{name}={default}, or a larger ep_size"
            )
    if config.reshard_experts_after_forward is not None:
        _check_flag("engine.reshard_experts_after_forward", config.reshard_experts_after_forward)
    if config.activation_checkpointing not in ("auto", *CHECKPOINTING):
        raise SettingError(
            "engine.activation_checkpointing",
            config.activation_checkpointing,
            f"is one of auto, {', '.join(CHECKPOINTING)}.",
            "engine.activation_checkpointing=auto",
        )
    _check_patterns(config)
    if config.ulysses_sequence_parallel_size > 1 and config.compile_dense:
        raise SettingError(
            "engine.compile_dense",
            config.compile_dense,
            "what is compiled may hold no collective, and with sequence parallelism "
            f"(engine.ulysses_sequence_parallel_size={config.ulysses_sequence_parallel_size}) attention does.",
            "engine.compile_dense=False",
        )
    for name in ("record_file", "replay_file"):
        if getattr(config.router_replay, name) is not None:
            rule = "routes are kept in the batch, and in no file."
            raise SettingError(
                f"engine.router_replay.{name}", getattr(config.router_replay, name), rule, "leave it out"
            )
    if config.experts_backend not in BACKENDS:
        raise SettingError(
            "engine.experts_backend",
            config.experts_backend,
            f"is one of {', '.join(BACKENDS)}.",
            "engine.experts_backend=auto",
        )
    if config.rollout_sync not in WANTED:
        raise SettingError(
            "engine.rollout_sync", config.rollout_sync, f"is one of {', '.join(WANTED)}.", "engine.rollout_sync=auto"
        )
    if not _is_whole(config.rollout_sync_verify) or config.rollout_sync_verify < -1:
        raise SettingError(
            "engine.rollout_sync_verify",
            config.rollout_sync_verify,
            "is the number of syncs that are verified, or -1 for all of them.",
            "engine.rollout_sync_verify=2",
        )
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise SettingError(f"engine.{name}", value, "is a weight of a loss: 0 or more.", f"engine.{name}=0.001")
    for name in ("sync_megabytes", "sync_timeout_seconds"):
        if getattr(config, name) <= 0:
            raise SettingError(
                f"engine.{name}", getattr(config, name), "has to be positive.", "leave it at its default"
            )


def _check_patterns(config: EPFSDP2EngineConfig) -> None:
    """The two settings that name parts of a model; whether they are there is seen when the model is built."""
    plan, islands = config.expert_plan or {}, config.fp32_modules
    if not isinstance(plan, Mapping) or not all(_is_whole(dim) and dim >= 0 for dim in plan.values()):
        raise SettingError(
            "engine.expert_plan",
            plan,
            "maps patterns of parameter names to the dim that counts the experts.",
            "engine.expert_plan='{model.layers.*.moe.w1: 0}'",
        )
    if isinstance(islands, str) or not all(isinstance(pattern, str) for pattern in islands):
        raise SettingError(
            "engine.fp32_modules",
            islands,
            "is a list of patterns of module names.",
            "engine.fp32_modules=['*.mlp.gate']",
        )


def _is_whole(value: Any) -> bool:
    # True == 1 and 2.0 == 2, and a command line gives both by mistake.
    return isinstance(value, int) and not isinstance(value, bool)


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise SettingError(name, value, "is true or false.", f"{name}=true")


def _check_dtype(name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in DTYPES:
        raise SettingError(
            f"engine.{name}",
            value,
            f"is one of {', '.join(DTYPES)}: float16 would need its loss scaled, which this engine does not do.",
            f"engine.{name}={'fp32' if name == 'model_dtype' else 'bf16'}",
        )


def engine_config(**settings: Any) -> EPFSDP2EngineConfig:
    """Build the engine's config from the keys under ``engine.``; Hydra's ``_target_`` of that node.

    Raises:
        DriverError: for a key that the engine does not have, with the nearest one that it has; or for a value that no
            model could make right.
    """
    _check_keys("engine", settings, engine_settings())
    replay = settings.get("router_replay")
    if replay is not None and not isinstance(replay, EngineRouterReplayConfig):
        _check_keys("engine.router_replay", replay, {f.name for f in fields(EngineRouterReplayConfig)})
        if replay.get("mode", "disabled") not in _REPLAY_MODES:
            rule = f"is one of {', '.join(_REPLAY_MODES)}."
            raise DriverError("engine.router_replay.mode", replay["mode"], rule, "engine.router_replay.mode=disabled")
        settings["router_replay"] = EngineRouterReplayConfig(**replay)
    try:
        return EPFSDP2EngineConfig(**settings)
    except SettingError as error:
        raise DriverError.of(error) from error


def _check_keys(node: str, settings: Mapping[str, Any], known: set[str]) -> None:
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            works = f"{node}.{near[0]}" if near else f"one of: {', '.join(sorted(known))}"
            raise DriverError(f"{node}.{key}", settings[key], "the engine has no such setting.", works)


def engine_settings() -> set[str]:
    """Names of the settings under ``engine.`` that a user may give."""
    return {f.name for f in fields(EPFSDP2EngineConfig) if not f.name.startswith("_")} - _SET_BY_VERL


@dataclass
class EPFSDP2ActorConfig(ActorConfig):
    """Actor, and with ``forward_only`` the reference policy: verl's settings, and the one engine node.

    ``rollout`` carries the rollout settings that the driver checks together with the engine's (see ``preflight``).
    """

    strategy: str = STRATEGY
    engine: Any = field(default_factory=EPFSDP2EngineConfig)
    forward_only: bool = False
    grad_clip: float = 1.0
    use_remove_padding: bool = False
    use_rollout_log_probs: bool = False
    rollout: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        self.engine = _engine_of(self.engine, self.forward_only)
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
        try:
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
        except SettingError as error:
            raise DriverError.of(error) from error
        housekeeping.report_leftovers()


@dataclass
class EPFSDP2CriticConfig(CriticConfig):
    """Critic: verl's settings, and the one engine node."""

    strategy: str = STRATEGY
    engine: Any = field(default_factory=EPFSDP2EngineConfig)
    grad_clip: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        self.engine = _engine_of(self.engine, forward_only=False)

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """As the actor's, for the critic's model.

        Raises:
            DriverError: see ``preflight.check_training``.
        """
        super().validate(n_gpus, train_batch_size)
        try:
            check_training(
                self.engine,
                n_gpus,
                self.model,
                checkpoint=self.checkpoint,
                optim=self.optim,
                device=get_device_name(),
                setting="critic.model",
            )
        except SettingError as error:
            raise DriverError.of(error) from error


def critic_config(**settings: Any) -> EPFSDP2CriticConfig:
    """Build the critic's config; Hydra's ``_target_`` of ``critic``, with ``_recursive_: false``.

    Building ``critic.model`` would ask the hub for a path that is not there, so that is looked at first.

    Raises:
        DriverError: if there is no such model.
    """
    try:
        check_model_path(settings["model"], "critic.model")
    except SettingError as error:
        raise DriverError.of(error) from error
    for key, value in settings.items():
        if isinstance(value, Mapping):
            settings[key] = instantiate(value, _convert_="partial")
    return EPFSDP2CriticConfig(**settings)


def _engine_of(engine: Any, forward_only: bool) -> EPFSDP2EngineConfig:
    """A config of its own for each role: verl writes batch sizes into it."""
    return replace(engine, forward_only=forward_only, _of_a_role=True)
