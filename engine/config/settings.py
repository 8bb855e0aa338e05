"""The list of the engine's settings, their checks, and the options of ``parallelize`` that they feed.

``roles.EPFSDP2EngineConfig`` is this dataclass with the fields that verl sets of any engine. ``docs/generate.py``
writes ``conf/engine/epfsdp2.yaml`` and ``docs/settings.md`` from it: the string below a setting is its help.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import SettingError, nearest
from ..fsdp.activation_checkpoint import CHECKPOINTING
from ..fsdp.options import ShardingOptions
from ..moe.deepep import DISPATCHERS
from ..moe.gemm.backends import BACKENDS, REGISTERED
from .values import (
    DTYPE,
    DTYPES,
    EXPERT_PLAN,
    FLAG,
    KEPT_DTYPE,
    LOSS_WEIGHT,
    MIXED_PRECISION,
    PATTERNS,
    POSITIVE,
    POSITIVE_NUMBER,
    REPLAY,
    SEED,
    STRATEGY,
    get_setting,
    is_whole,
    must,
    one_of,
    optional,
    setting,
    whole,
)

__all__ = [
    "PLANNED",
    "SETTINGS",
    "EngineSettings",
    "as_yaml",
    "check_settings",
    "expert_settings",
    "mtp_loss_coef",
    "param_dtype",
    "planned_overrides",
    "planned_settings",
    "sharding_options",
]

_STRATEGY = must(lambda value: value == STRATEGY, "this engine has one strategy.", STRATEGY)
_RANKS = whole(1, "is a number of ranks, or -1 for all of them.", "-1", besides=(-1,))
_SHARD_DIM = must(
    lambda value: (isinstance(value, str) and value == "auto") or (is_whole(value) and value in (0, 1)),
    "experts are sharded over ep_fsdp along dim 0 (whole experts), dim 1, or dim 0 where that divides.",
    "auto",
)
_BACKEND = must(
    lambda value: isinstance(value, str) and (value in BACKENDS or value.startswith(REGISTERED)),
    f"is {', '.join(BACKENDS)} or {REGISTERED}NAME.",
    "auto",
)
_SMS = whole(-1, "is a number of SMs of a GPU, or -1.", "-1")
_PREFETCH = whole(0, "is the number of layers gathered ahead, 0 for none.", "1")
_CHUNKS = whole(1, "is the number of parts in which a layer's tokens are dispatched, or -1.", "-1", besides=(-1,))
_SYNCED_AS = one_of(("auto", "full", "sliced"), "auto")  # rollout/layout/specs.py has the modes, and a test compares
_ROUNDED = must(lambda value: isinstance(value, bool) or value == "experts", "is true, false or experts.", "true")
_SYNCS = whole(0, "is the number of syncs that are verified, or -1 for all of them.", "2", besides=(-1,))
_DIFFERENCE = must(
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1,
    "is a difference of probabilities, from 0 (never) to 1.",
    "0.02",
)
_FOLDER = must(lambda value: isinstance(value, str) and bool(value), "is a folder that all nodes see.", "null")


@dataclass
class EngineSettings:
    """The settings under ``engine.``: type, default, rule and help of each. Needs neither verl nor Hydra.

    ``shards`` marks a field of ``ShardingOptions`` (its name there if it differs), ``of_experts`` a setting of experts
    alone. A setting that verl's ``FSDPEngineConfig`` has too has its name and meaning.

    ``ep * etp * ep_fsdp * dp_replicate == world``, with ``ep = ep_size``, ``etp = etp_size`` and ``dp_replicate =
    world / fsdp_size`` (1 if ``fsdp_size`` is -1).
    """

    strategy: str = setting(STRATEGY, _STRATEGY)
    """Name under which verl's registry knows the engine"""
    ep_size: int = setting(1, POSITIVE, of_experts=True)
    """Ranks over which a layer's experts are split, neighbours in one expert-parallel group. Divides the number of
    experts and fsdp_size. 1: none (python -m epfsdp2.recipes.plan lists legal values)"""
    etp_size: int = setting(1, POSITIVE, of_experts=True)
    """Expert tensor parallelism: neighbouring ranks that share each expert, cut along its inner dim. Divides that dim
    (with biases or adapters the hidden size too) and fsdp_size / ep_size"""
    expert_shard_dim: Any = setting("auto", _SHARD_DIM, shards=True, of_experts=True)
    """Dim of the stacked expert weights [E, ..., ...] that FSDP shards: 1 splits every expert, 0 keeps experts whole,
    auto is 0 if the experts divide evenly"""
    expert_plan: dict[str, int] | None = setting(None, EXPERT_PLAN, shards=True, of_experts=True)
    """For models whose experts do not use transformers' experts interface: pattern of parameter names -> dim that
    counts the experts, e.g. {model.layers.*.moe.w1: 0, model.layers.*.moe.w2: 0}"""
    experts_backend: str = setting("auto", _BACKEND, shards=True, of_experts=True)
    """Kernels of the experts: torch; triton (compute capability 8.0 and up); auto, the fastest of these; reference,
    plain operators with far more memory; transformers:NAME, a function of ALL_EXPERTS_FUNCTIONS (grouped_mm, ...)"""
    communication_sms: int = setting(-1, _SMS, shards=True)
    """SMs of a GPU that grouped GEMMs leave to collectives, about NCCL's CTAs (NCCL_MAX_CTAS), because persistent
    GEMMs would delay these. -1: 16 with several GPUs, else 0"""
    fsdp_size: int = setting(-1, _RANKS)
    """Ranks in each shard group; -1 for all. A smaller number gives HSDP with world / fsdp_size replicas"""
    ulysses_sequence_parallel_size: int = setting(1, POSITIVE)
    """Ulysses: neighbouring ranks that share packed rows of up to size * max_token_len_per_gpu tokens. Divides the
    ranks and the attention heads; needs model.use_remove_padding. 1: none"""
    model_dtype: str = setting("fp32", KEPT_DTYPE)
    """dtype of the parameters that the optimizer steps on: fp32 or bf16. (The rollout gets weights in the forward's
    dtype)"""
    save_frozen_base: bool = setting(False, FLAG)
    """Save the frozen weights of a run with adapters too. If not, checkpoints hold their checksums, and a resumed run
    is refused if its model.path differs from these"""
    allow_unused_weights: bool = setting(False, FLAG)
    """Accept checkpoint tensors that the model has no place for, unread. If not, an error names the first, except
    those that the model's class ignores itself"""
    mixed_precision: dict[str, Any] | None = setting(None, MIXED_PRECISION)
    """FSDP2 mixed precision, e.g. {param_dtype: bf16, reduce_dtype: fp32}; null: dtype, with reductions in fp32.
    Buffers are never cast, so buffer_dtype is fp32 or left out"""
    dtype: str = setting("bfloat16", DTYPE)
    """dtype of gathered parameters and compute unless mixed_precision sets it: fp32, bf16, or fp16 with a dynamic loss
    scale, which skips steps whose gradients overflow"""
    fp32_modules: list[str] = setting(list, PATTERNS, shards=True)
    """Patterns of modules that compute in float32 whatever dtype is, e.g. ['*.mlp.gate'] for routers. transformers'
    _keep_in_fp32_modules_strict always do"""
    reshard_after_forward: bool = setting(True, FLAG, shards=True)
    """Free gathered parameters after forward and gather them again in backward: less memory, more communication"""
    reshard_experts_after_forward: bool | None = setting(None, optional(FLAG), shards=True, of_experts=True)
    """The same for experts alone; null: as reshard_after_forward. False saves a gather where ep_size is large and a
    rank's experts are few"""
    keep_casts: bool = setting(False, FLAG, shards=True, of_experts=True)
    """Cast weights that one rank alone holds (experts, with ep_size * etp_size = fsdp_size) once for all
    micro-batches of a batch and their recomputation; the plan counts the memory"""
    prefetch_depth: int = setting(1, _PREFETCH, shards=True)
    """Layers (and the embeddings, and the head) that are gathered ahead of the compute; 0 for none"""
    dispatch_chunks: int = setting(-1, _CHUNKS, shards=True, of_experts=True)
    """Parts in which a layer's tokens are dispatched, so that exchange and compute overlap; more than 1 needs
    ep_size > 1. -1: chosen by sizes on NVIDIA GPUs, else 1"""
    overlap_shared_experts: bool | None = setting(None, optional(FLAG), shards=True, of_experts=True)
    """Compute a layer's shared experts while its tokens are exchanged, in families that call them after the experts
    (docs/engine.md); needs ep_size > 1. null: for those, on NVIDIA GPUs"""
    dispatcher: str = setting("all_to_all", one_of(DISPATCHERS, "all_to_all"), shards=True, of_experts=True)
    """Exchange of tokens: all_to_all, torch's; deepep, DeepEP's kernels, with deep_ep installed (bfloat16, hidden size
    a multiple of 256, its ep_sizes, no dispatch_chunks)"""
    activation_checkpointing: str = setting("auto", one_of(("auto", *CHECKPOINTING), "auto"), shards="checkpointing")
    """Recompute in backward: none; full, whole layers; selective, parts without experts, so that no all-to-all runs
    twice; auto, full or none by model.enable_gradient_checkpointing. Routes stay the same"""
    compile_dense: bool = setting(False, FLAG, shards=True)
    """torch.compile the parts of layers without experts; eager, with a line of log, if compiling fails"""
    fuse_dense: bool = setting(True, FLAG, shards=True)
    """On a GPU, compute RMSNorms and rotary embeddings by fused kernels; off with compile_dense"""
    freeze_vision_tower: bool = setting(False, FLAG, shards=True)
    """Freeze a model's vision tower, its merger included: no gradient and no optimizer state. For roles whose model
    has one"""
    param_offload: bool = setting(False, FLAG)
    """Keep parameters on the CPU between phases (both of verl's offloads are manual, unlike offload_policy)"""
    optimizer_offload: bool = setting(False, FLAG)
    """Keep optimizer state on the CPU between phases"""
    offload_policy: bool = setting(False, FLAG, shards="cpu_offload")
    """FSDP2's own CPU offload of parameters, gradients and optimizer state during training"""
    use_no_sync_for_gradient_accumulation: bool = setting(False, FLAG)
    """Reduce gradients after the last micro-batch only: less communication, and unsharded gradients stay in memory
    between micro-batches"""
    chunked_logits: bool = setting(True, FLAG, shards=True)
    """Compute log-probs and entropies in the head, tile by tile, never whole logits. Families that change logits after
    the head, and losses on other values of logits, compute whole ones"""
    entropy_from_logits_with_chunking: bool = setting(False, FLAG)
    """Compute the entropy of whole logits in chunks"""
    entropy_from_logits_chunk_size: int = setting(2048, POSITIVE)
    """Tokens per chunk of the entropy"""
    entropy_checkpointing: bool = setting(False, FLAG)
    """Recompute the entropy of whole logits in backward"""
    use_torch_compile: bool = setting(False, FLAG)
    """Compile verl's entropy function with torch.compile. Off, unlike in verl: compiling costs start-up time"""
    pad_to_length: bool = setting(False, FLAG)
    """Round every packed micro-batch up to a multiple of pad_to_length_bucket tokens, so that kernels see few shapes"""
    pad_to_length_bucket: int = setting(1024, POSITIVE)
    """Multiple of tokens for pad_to_length"""
    seed: int = setting(42, SEED)
    """Random seed"""
    full_determinism: bool = setting(False, FLAG)
    """Enable full determinism, for debugging"""
    batch_invariant: bool = setting(False, FLAG, shards=True)
    """Compute log-probs with the same bits whatever shares the sequence's micro-batch, on any mesh
    (docs/features.md); needs model.use_remove_padding"""
    old_log_probs_from_update: bool = setting(False, FLAG)
    """With one update per batch, take old log-probs from its forward and skip verl's pass before it; needs
    batch_invariant (docs/features.md)"""
    forward_only: bool = setting(False, FLAG)
    """Never run a backward; ref sets it for itself"""
    rollout_sync: str = setting("auto", _SYNCED_AS)
    """Weights that a rank sends to the rollout worker beside it: full tensors; sliced, the worker's parts; auto,
    sliced if rollout, version and family allow it, else full, logged"""
    rollout_quantization_aware: Any = setting(False, _ROUNDED)
    """Compute with weights rounded as a rollout in FP8 (rollout.quantization=fp8) or compressed-tensors gets them:
    true, all that it quantises; experts, theirs alone. For actor and reference policy"""
    rollout_bitwise: bool = setting(False, FLAG)
    """Compute log-probs with vLLM's bits (training/rollout_probs_diff_max is 0), by operators that trainer and vLLM
    share: Qwen3 and Qwen3-MoE on a CPU (docs/features.md); needs batch_invariant"""
    rollout_sync_verify: int = setting(2, _SYNCS)
    """Number of first syncs that are verified: checksums of every tensor when sent and received, and of slices in the
    worker's parameters. -1: all; 0: none"""
    sync_megabytes: int = setting(2048, POSITIVE)
    """Upper bound in MB on a rank's buffers in a sync, besides the transport's bucket. In a full sync, a tensor that a
    checkpoint holds whole may exceed it"""
    sync_timeout_seconds: float = setting(300.0, POSITIVE_NUMBER)
    """Seconds after which a sync without progress ends the run with its cause. The rollout's final processing of
    weights, which shows no progress, must finish within them"""
    survivors_folder: str | None = setting(None, optional(_FOLDER))
    """Folder through which, after a failure, living ranks are asked to save their shards; set by recipes.resilient
    --save-on-failure. null: none"""
    router_aux_loss_coef: float = setting(0.0, LOSS_WEIGHT, of_experts=True)
    """Weight of the routers' load-balancing loss, over the tokens of all ranks in a micro-batch; 0: none. The model's
    own router_aux_loss_coef is not read"""
    router_z_loss_coef: float = setting(0.0, LOSS_WEIGHT, of_experts=True)
    """Weight of the routers' z-loss; 0 for none"""
    router_metrics: bool = setting(False, FLAG, of_experts=True)
    """Log in each update the busiest and the idlest expert's load against an even load, the (token, expert) pairs
    without an expert's output, and the losses above"""
    mtp_loss_coef: float | None = setting(None, optional(LOSS_WEIGHT))
    """Weight of the loss of the checkpoint's multi-token prediction layers, trained to draft as the policy
    (docs/features.md). 0: kept, exported and synced as they are. null: as model.mtp says, else left out"""
    router_replay: Any = setting(lambda: SimpleNamespace(mode="disabled", record_file=None, replay_file=None), REPLAY)
    """Route an update's tokens as before: disabled; R2, as for the old log-probs; R3, as in the rollout, for log-probs
    and update, with actor_rollout_ref.rollout.enable_rollout_routing_replay=True"""
    indexer_replay: bool = setting(False, FLAG)
    """Attend in an update to the keys that sparse attention's indexers chose for the old log-probs. A sequence of n
    tokens then has n * n / 8 bytes for each indexer in the batch"""
    mismatch_warning: float = setting(0.02, _DIFFERENCE)
    """Print a line when probabilities of rollout and trainer differ by more in the mean, and whenever this doubles;
    needs rollout.calculate_log_probs. 0: never. recipes.mismatch finds the cause"""


SETTINGS = frozenset(entry.name for entry in fields(EngineSettings))
PLANNED = ("model_dtype", "dtype", "mixed_precision", *(f.name for f in fields(EngineSettings) if f.metadata["shards"]))
"""The settings that a step's memory and traffic on one mesh depend on."""
# Values of the settings of dispatch that overlap nothing.
_PLAIN_DISPATCH = {"dispatch_chunks": 1, "overlap_shared_experts": False, "dispatcher": "all_to_all"}


def check_settings(config: Any) -> None:
    """Refuse values that are wrong for every model and every number of ranks.

    Raises:
        SettingError: naming the first such setting.
    """
    _check_rules(config)
    for name, plain in _PLAIN_DISPATCH.items():
        value = getattr(config, name)
        if value in (plain, expert_settings()[name]):
            continue
        if config.dispatcher == "deepep" and name != "dispatcher":
            rule = "is for all_to_all: DeepEP (engine.dispatcher=deepep) sends a layer's tokens at once."
            raise SettingError(f"engine.{name}", value, rule, f"engine.{name}={plain}")
        if config.ep_size == 1:
            rule = "no token is sent where a rank holds all experts (engine.ep_size=1)."
            raise SettingError(f"engine.{name}", value, rule, f"engine.{name}={plain}, or a larger ep_size")
    if config.dispatcher == "deepep" and config.etp_size > 1:
        rule = f"sends rows to ranks that hold experts whole, and engine.etp_size={config.etp_size} cuts them."
        raise SettingError("engine.dispatcher", "deepep", rule, "engine.dispatcher=all_to_all, or engine.etp_size=1")
    name, size = "engine.ulysses_sequence_parallel_size", config.ulysses_sequence_parallel_size
    if size > 1 and config.compile_dense:
        rule = f"compiled parts must have no collective; attention has with {name}={size}."
        raise SettingError("engine.compile_dense", True, rule, "engine.compile_dense=False")
    if config.old_log_probs_from_update and not config.batch_invariant:
        rule = "the pass for old log-probs packs sequences otherwise than the update."
        works = "engine.batch_invariant=True, or engine.old_log_probs_from_update=False"
        raise SettingError("engine.old_log_probs_from_update", True, rule, works)
    if param_dtype(config) is torch.float16 and DTYPES[config.model_dtype] is not torch.float32:
        rule = "parameters whose forward computes in float16 are kept in float32."
        raise SettingError("engine.model_dtype", config.model_dtype, rule, "engine.model_dtype=fp32")


def _check_rules(config: Any) -> None:
    for entry in fields(EngineSettings):
        entry.metadata["rule"](f"engine.{entry.name}", getattr(config, entry.name))


def expert_settings() -> dict[str, Any]:
    """Return the settings that concern experts alone, with their defaults."""
    return {entry.name: entry.default for entry in fields(EngineSettings) if entry.metadata["of_experts"]}


def sharding_options(config: Any, model: Any = None) -> ShardingOptions:
    """Return the options of ``parallelize``: the settings declared with ``shards``, and some of verl's for the model.

    Args:
        config: the engine's settings.
        model: verl's settings of the model, mapping or object; one that is missing is off.
    """
    declared = {
        entry.name if shards is True else shards: getattr(config, entry.name)
        for entry in fields(EngineSettings)
        if (shards := entry.metadata["shards"])
    }
    # Automatic overlap is off until sizes decide (``automatic.py``).
    declared["dispatch_chunks"] = max(declared["dispatch_chunks"], 1)
    declared["overlap_shared_experts"] = bool(declared["overlap_shared_experts"])
    if declared["checkpointing"] == "auto":
        declared["checkpointing"] = "full" if get_setting(model, "enable_gradient_checkpointing") else "none"
    return ShardingOptions(
        **declared,
        param_dtype=param_dtype(config),
        reduce_dtype=DTYPES[(config.mixed_precision or {}).get("reduce_dtype", "fp32")],
        activation_offload=bool(get_setting(model, "enable_activation_offload")),
        head_in_root=bool(get_setting(model, "use_fused_kernels")),
    )


def mtp_loss_coef(config: Any, model: Any) -> float | None:
    """Return the weight of the loss of multi-token prediction layers; None if they are left out.

    Without ``engine.mtp_loss_coef``, verl's ``model.mtp`` decides: ``enable`` keeps them, ``enable_train`` trains them.
    """
    if config.mtp_loss_coef is not None or not get_setting(model, "mtp.enable"):
        return config.mtp_loss_coef
    return get_setting(model, "mtp.mtp_loss_scaling_factor") if get_setting(model, "mtp.enable_train") else 0.0


def param_dtype(config: Any) -> torch.dtype:
    """Return the dtype of the gathered parameters and of the compute."""
    return DTYPES[(config.mixed_precision or {}).get("param_dtype", config.dtype)]


def planned_overrides(config: Any, options: ShardingOptions) -> list[str]:
    """Return the ``PLANNED`` settings that are not at their default, as ``planned_settings`` reads them."""
    default = planned_settings({})
    values = {name: getattr(config, name) for name in PLANNED}
    values |= {"activation_checkpointing": options.checkpointing, "fuse_dense": options.fuse_dense}
    return [f"engine.{name}={as_yaml(value)}" for name, value in values.items() if value != getattr(default, name)]


def planned_settings(overrides: Mapping[str, Any]) -> EngineSettings:
    """Return the settings with these values, by their names under ``engine.``.

    Raises:
        SettingError: for a value that breaks its rule, or a name that is not ``PLANNED``.
    """
    settings = EngineSettings(activation_checkpointing="full")
    for name, value in overrides.items():
        if name not in PLANNED:
            works = nearest("engine", name, PLANNED) or f"one of: {', '.join(PLANNED)}"
            raise SettingError(f"engine.{name}", value, "the plan does not depend on such a setting.", works)
        setattr(settings, name, value)
    _check_rules(settings)
    return settings


def as_yaml(value: Any) -> str:
    """Format a setting's value in one line, as YAML and Hydra's command line read it."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_yaml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)
