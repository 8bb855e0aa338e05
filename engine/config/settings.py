"""The list of the engine's settings, each with its default, its rule, what it does, and what it says of sharding.

``config.EPFSDP2EngineConfig`` is this dataclass with what verl sets of any engine. ``docs/generate.py`` writes
``conf/engine/epfsdp2.yaml`` and ``docs/settings.md`` from it, ``derived.py`` the options of ``parallelize`` and of
``recipes/plan``. A setting that means what verl's ``FSDPEngineConfig`` means has its name.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import SettingError, close_matches
from ..fsdp.activation_checkpoint import CHECKPOINTING
from ..fsdp.options import ShardingOptions
from ..moe.deepep import DISPATCHERS
from ..moe.gemm.backends import BACKENDS, REGISTERED, TORCHAO
from .rules import (
    DTYPE,
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
    is_whole,
    must,
    one_of,
    optional,
    setting,
    whole,
)
from .values import DTYPES, STRATEGY, get_setting

__all__ = [
    "PLANNED",
    "EngineSettings",
    "as_yaml",
    "check_fields",
    "check_settings",
    "expert_settings",
    "param_dtype",
    "planned_overrides",
    "planned_settings",
    "sharding_options",
]

_RANKS = whole(1, "is a number of ranks, or -1 for all of them.", "-1", besides=(-1,))
_SHARD_DIM = must(
    lambda value: (isinstance(value, str) and value == "auto") or (is_whole(value) and value in (0, 1)),
    "experts are sharded over ep_fsdp along dim 0 (whole experts), dim 1, or dim 0 where that divides.",
    "auto",
)
_CHUNKS = whole(1, "is the number of parts in which a layer's tokens are dispatched, or -1.", "-1", besides=(-1,))
# How weights may be sent; rollout/layout/specs.py has the ways, and a test compares.
_SYNCED_AS = ("auto", "full", "sliced")
_ROUNDED = must(lambda v: isinstance(v, bool) or v == "experts", "is true, false or experts.", "true")
_SYNCS = whole(0, "is the number of syncs that are verified, or -1 for all of them.", "2", besides=(-1,))


def _no_replay() -> Any:
    return SimpleNamespace(mode="disabled", record_file=None, replay_file=None)


@dataclass
class EngineSettings:
    """The settings under ``engine.``, which need neither verl nor Hydra.

    ``ep * etp * ep_fsdp * dp_replicate == world``, with ``ep = ep_size``, ``etp = etp_size``, ``dp_replicate = world /
    fsdp_size`` (1 where ``fsdp_size`` is -1) and ``ep_fsdp`` what is left.
    """

    strategy: str = setting(
        STRATEGY,
        must(lambda v: v == STRATEGY, "this engine has one strategy.", STRATEGY),
        "Name under which verl's registry knows the engine",
    )
    ep_size: int = setting(
        1,
        POSITIVE,
        "Ranks over which the experts of a layer are split: each holds num_experts / ep_size of them, and "
        "neighbouring ranks form one expert-parallel group. Has to divide the number of experts and fsdp_size. 1: "
        "no expert parallelism (python -m epfsdp2.recipes.plan lists what is legal on a cluster, with the memory "
        "that each needs). This and all that concerns experts counts for the roles whose model has some; another "
        "role is sharded by FSDP2 over all ranks",
        of_experts=True,
    )
    etp_size: int = setting(
        1,
        POSITIVE,
        "Expert tensor parallelism: neighbouring ranks that share each expert, cut along its inner dim. They gather "
        "the tokens that were dispatched to them and add up their outputs, so that they exchange as many times more "
        "rows; what FSDP gathers of experts gets smaller. For few large experts, and where there are more ranks "
        "than experts. Has to divide the experts' inner size, with biases or adapters their hidden size, and "
        "fsdp_size / ep_size. 1: a rank holds its experts whole",
        of_experts=True,
    )
    expert_shard_dim: Any = setting(
        "auto",
        _SHARD_DIM,
        "Dim of the stacked expert weights [E, ..., ...] that is sharded over the remaining ranks (ep_fsdp): 1 "
        "splits every expert, 0 keeps experts whole (only where they divide evenly), auto takes 0 where it can. With "
        "etp_size the dim that splits an expert is its hidden one",
        shards=True,
        of_experts=True,
    )
    expert_plan: dict[str, int] | None = setting(
        None,
        EXPERT_PLAN,
        "For a model of your own whose experts are not on transformers' experts interface: pattern of parameter "
        "names -> dim that counts the experts, e.g. {model.layers.*.moe.w1: 0, model.layers.*.moe.w2: 0}",
        shards=True,
        of_experts=True,
    )
    experts_backend: str = setting(
        "auto",
        must(
            lambda value: isinstance(value, str) and (value in BACKENDS or value.startswith((REGISTERED, TORCHAO))),
            f"is {', '.join(BACKENDS)}, {TORCHAO}mxfp8 or {REGISTERED}NAME.",
            "auto",
        ),
        "What computes the experts: torch; triton, kernels for a GPU of compute capability 8.0 and up; auto, what "
        "is fastest of them for the machine and the dtype; reference, plain operators, which keep several times "
        "as much for backward; torchao:mxfp8, products of values in MXFP8 by torchao, for a GPU of compute capability "
        "10; transformers:NAME, the function of that name in transformers' ALL_EXPERTS_FUNCTIONS "
        "(grouped_mm, batched_mm, sonicmoe, ... or one of your own)",
        shards=True,
        of_experts=True,
    )
    communication_sms: int = setting(
        -1,
        whole(-1, "is a number of SMs of a GPU, or -1.", "-1"),
        "SMs of a GPU that grouped GEMMs leave to collectives: about as many as NCCL has CTAs (NCCL_MAX_CTAS). -1: 16 "
        "with several GPUs, else 0. Without them a persistent GEMM waits for the collective's SMs",
        shards=True,
    )
    fsdp_size: int = setting(
        -1,
        _RANKS,
        "Ranks in each shard group; -1 means all of them. A smaller one gives HSDP: world / fsdp_size replicas",
    )
    ulysses_sequence_parallel_size: int = setting(
        1,
        POSITIVE,
        "Ulysses sequence parallelism: neighbouring ranks that share packed rows, each a slice of their tokens; a "
        "rank then has batches of world / this many. Has to divide the ranks and the attention heads; needs "
        "model.use_remove_padding. max_token_len_per_gpu is per rank: a row may be this many times as long. 1: "
        "each rank has rows of its own",
    )
    model_dtype: str = setting(
        "fp32",
        KEPT_DTYPE,
        "dtype of the parameters that the optimizer steps on. (Weights are sent to the rollout in the dtype "
        "that the forward computes with.) fp32 or bf16",
    )
    save_frozen_base: bool = setting(
        False,
        FLAG,
        "Whether checkpoints of a run with adapters hold the frozen weights too. Otherwise they hold the adapters, and "
        "checksums of the weights: a run that resumes has these from its model.path, and is refused where they differ",
    )
    allow_unused_weights: bool = setting(
        False,
        FLAG,
        "Whether the checkpoint may have tensors that the model has no place for; they are not read. Otherwise an "
        "error names the first, but for those that the model's class leaves out itself",
    )
    mixed_precision: dict[str, Any] | None = setting(
        None,
        MIXED_PRECISION,
        "FSDP2 mixed precision, e.g. {param_dtype: bf16, reduce_dtype: fp32}; null means dtype with reductions in "
        "fp32. Buffers are never cast, so buffer_dtype is fp32 or left out",
    )
    dtype: str = setting(
        "bfloat16",
        DTYPE,
        "dtype in which parameters are gathered and computed with where mixed_precision does not say: fp32, bf16, or "
        "fp16, whose loss is scaled; the scale adapts, and a step whose gradients overflow is skipped",
    )
    fp32_modules: list[str] = setting(
        None,
        PATTERNS,
        "Patterns of modules that compute in float32 whatever dtype says, e.g. ['*.mlp.gate'] for routers. What "
        "the model's class keeps in float32 by itself (transformers' _keep_in_fp32_modules_strict) does so anyway",
        factory=list,
        shards=True,
    )
    reshard_after_forward: bool = setting(
        True,
        FLAG,
        "Free gathered parameters after forward and gather them again in backward: less memory, more communication",
        shards=True,
    )
    reshard_experts_after_forward: bool | None = setting(
        None,
        optional(FLAG),
        "The same for the experts alone; null means as reshard_after_forward. False saves a gather of the experts "
        "in backward where ep_size is large and a rank's experts are few",
        shards=True,
        of_experts=True,
    )
    keep_casts: bool = setting(
        False,
        FLAG,
        "Cast weights that a rank shares with no other (experts, with ep_size * etp_size = fsdp_size) once for all "
        "micro-batches of a batch and their recomputation; the plan counts the memory",
        shards=True,
        of_experts=True,
    )
    prefetch_depth: int = setting(
        1,
        whole(0, "is the number of layers gathered ahead, 0 for none.", "1"),
        "Layers (and the embeddings, and the head) that are gathered ahead of what computes; 0 for none",
        shards=True,
    )
    dispatch_chunks: int = setting(
        -1,
        _CHUNKS,
        "Parts in which a layer's tokens are dispatched: one is exchanged while another computes. More than 1 needs "
        "ep_size > 1. -1: by the sizes of model, mesh and micro-batch on NVIDIA GPUs, else 1",
        shards=True,
        of_experts=True,
    )
    overlap_shared_experts: bool | None = setting(
        None,
        optional(FLAG),
        "Compute a layer's shared experts while its tokens are exchanged. For families that call them after the "
        "experts (docs/engine.md); needs ep_size > 1. null: for those, on NVIDIA GPUs",
        shards=True,
        of_experts=True,
    )
    dispatcher: str = setting(
        "all_to_all",
        one_of(DISPATCHERS, "all_to_all"),
        "What brings tokens to their experts: all_to_all, torch's; or deepep, DeepEP's kernels, where deep_ep is "
        "installed (bfloat16, a hidden size of a multiple of 256, one of the ep_sizes that it has kernels for, no "
        "dispatch_chunks)",
        shards=True,
        of_experts=True,
    )
    activation_checkpointing: str = setting(
        "auto",
        one_of(("auto", *CHECKPOINTING), "auto"),
        "What is computed again in backward instead of kept: none; full, each layer whole; selective, the parts "
        "of a layer without experts, so that no all-to-all runs twice; auto, full or none as "
        "model.enable_gradient_checkpointing says. A token is routed the same way when it is computed again",
        shards="checkpointing",
    )
    compile_dense: bool = setting(
        False,
        FLAG,
        "torch.compile the parts of layers without experts; eager, with a line of log, where compiling fails",
        shards=True,
    )
    fuse_dense: bool = setting(
        True,
        FLAG,
        "On a GPU, compute RMSNorms and rotary embeddings by fused kernels; off with compile_dense",
        shards=True,
    )
    freeze_vision_tower: bool = setting(
        False,
        FLAG,
        "Leave the weights of a model's vision tower, its merger included, as they are: no gradient and no optimizer "
        "state for them. For a role whose model has one",
        shards=True,
    )
    param_offload: bool = setting(
        False,
        FLAG,
        "Whether to keep parameters on the CPU between phases (both of verl's offloads are manual, unlike "
        "offload_policy)",
    )
    optimizer_offload: bool = setting(False, FLAG, "Whether to keep optimizer state on the CPU between phases")
    offload_policy: bool = setting(
        False,
        FLAG,
        "FSDP2's own CPU offload of parameters, gradients and optimizer state during training",
        shards="cpu_offload",
    )
    use_no_sync_for_gradient_accumulation: bool = setting(
        False,
        FLAG,
        "Whether to defer gradient synchronization until the last micro-batch: less communication, and unsharded "
        "gradients stay in memory between micro-batches",
    )
    chunked_logits: bool = setting(
        True,
        FLAG,
        "Compute log-probs and entropies in the head's forward, a tile of the logits at a time, which backward "
        "computes again: logits are never whole. They are, as with False, where a family changes them after its head, "
        "and in micro-batches of which verl computes something else (top-k distillation, sums of squared "
        "probabilities)",
        shards=True,
    )
    entropy_from_logits_with_chunking: bool = setting(
        False,
        FLAG,
        "Whether to compute the entropy of whole logits in chunks",
    )
    entropy_from_logits_chunk_size: int = setting(
        2048,
        POSITIVE,
        "Tokens per chunk of the entropy",
    )
    entropy_checkpointing: bool = setting(
        False,
        FLAG,
        "Whether to recompute the entropy of whole logits in backward",
    )
    use_torch_compile: bool = setting(
        False,
        FLAG,
        "Whether to compile verl's entropy function with torch.compile. Off, unlike in verl: compiling costs "
        "start-up time",
    )
    pad_to_length: bool = setting(
        False,
        FLAG,
        "Round every packed micro-batch up to a multiple of pad_to_length_bucket tokens, so that kernels see few "
        "shapes",
    )
    pad_to_length_bucket: int = setting(
        1024,
        POSITIVE,
        "Multiple of tokens for pad_to_length",
    )
    seed: int = setting(42, SEED, "Random seed")
    full_determinism: bool = setting(False, FLAG, "Whether to enable full determinism, for debugging")
    forward_only: bool = setting(
        False,
        FLAG,
        "Whether there is never a backward; ref sets it for itself",
    )
    rollout_sync: str = setting(
        "auto",
        one_of(_SYNCED_AS, "auto"),
        "What a trainer rank sends to the rollout worker beside it: full, every tensor whole; sliced, what the "
        "worker keeps; auto, sliced, or full with one line of log where the rollout, its version or the family allows "
        "no other",
    )
    rollout_quantization_aware: Any = setting(
        False,
        _ROUNDED,
        "Compute with weights rounded as a rollout in FP8 (rollout.quantization=fp8) or compressed-tensors is sent "
        "them: true, all that it quantises; experts, theirs. What is trained stays as it is. Of actor and reference "
        "policy",
    )
    rollout_sync_verify: int = setting(
        2,
        _SYNCS,
        "How many of the first syncs are verified: checksums of every tensor where it is sent and where it "
        "arrives, and of slices once more in the worker's parameters. -1: all syncs; 0: none",
    )
    sync_megabytes: int = setting(
        2048,
        POSITIVE,
        "Upper bound in MB on a rank's buffers in a weight sync: what a round sends, receives and puts together. A "
        "tensor that a checkpoint has whole may exceed it in a full sync. The transport's bucket comes on top",
    )
    sync_timeout_seconds: float = setting(
        300.0,
        POSITIVE_NUMBER,
        "Seconds after which a weight sync without progress ends the run with its cause; a rollout's final processing "
        "of the weights, which shows no progress, has to end within them too",
    )
    survivors_folder: str | None = setting(
        None,
        optional(must(lambda v: isinstance(v, str) and bool(v), "is a folder that all nodes see.", "null")),
        "Folder through which living ranks are told after a failure to write what they hold; set by "
        "recipes.resilient --save-on-failure. null: they are not",
    )
    router_aux_loss_coef: float = setting(
        0.0,
        LOSS_WEIGHT,
        "Weight of the load-balancing loss on the routers, over the tokens of all ranks in a micro-batch; 0 for "
        "none. The model's own router_aux_loss_coef is not read",
        of_experts=True,
    )
    router_z_loss_coef: float = setting(0.0, LOSS_WEIGHT, "Weight of the routers' z-loss; 0 for none", of_experts=True)
    router_metrics: bool = setting(
        False,
        FLAG,
        "Whether each update logs the load of the busiest and the idlest expert against an even load, the (token, "
        "expert) pairs that no expert computed, and the losses above",
        of_experts=True,
    )
    router_replay: Any = setting(
        None,
        REPLAY,
        "Router replay: have an update's tokens take the experts that they took before",
        factory=_no_replay,
        inner={
            "mode": (
                "disabled",
                "disabled; R2: as they took them for the old log-probs; R3: as they took them in the rollout, for both "
                "the old log-probs and the update, with actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            )
        },
    )


def check_fields(config: Any) -> None:
    """Apply the rule of every setting.

    Raises:
        SettingError: naming the first that breaks its rule.
    """
    for entry in fields(EngineSettings):
        entry.metadata["rule"](f"engine.{entry.name}", getattr(config, entry.name))


PLANNED = ("model_dtype", "dtype", "mixed_precision", *(f.name for f in fields(EngineSettings) if f.metadata["shards"]))
"""The settings that the memory and the traffic of a step on one mesh depend on."""


def expert_settings() -> dict[str, Any]:
    """Return the settings that concern experts alone, with their defaults."""
    return {entry.name: entry.default for entry in fields(EngineSettings) if entry.metadata["of_experts"]}


def sharding_options(config: Any, model: Any = None) -> ShardingOptions:
    """Return what ``parallelize`` gets of the settings that are declared with ``shards``, and of some of verl's.

    Args:
        config: the engine's settings.
        model: verl's settings of the model, mapping or object; what they say is off where they are missing.
    """
    declared = {
        entry.name if shards is True else shards: getattr(config, entry.name)
        for entry in fields(EngineSettings)
        if (shards := entry.metadata["shards"])
    }
    # What is automatic is off until sizes decide (``automatic.py``).
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


def param_dtype(config: Any) -> torch.dtype:
    """Return the dtype in which parameters are gathered and computed with."""
    return DTYPES[(config.mixed_precision or {}).get("param_dtype", config.dtype)]


def planned_overrides(config: Any, options: ShardingOptions) -> list[str]:
    """Return the ``PLANNED`` settings that are not at their default, as ``planned_settings`` takes them."""
    default = _planned_default()
    values = {name: getattr(config, name) for name in PLANNED}
    values |= {"activation_checkpointing": options.checkpointing, "fuse_dense": options.fuse_dense}
    return [f"engine.{name}={as_yaml(value)}" for name, value in values.items() if value != getattr(default, name)]


def planned_settings(overrides: Mapping[str, Any]) -> EngineSettings:
    """Return the settings with these values, by their names under ``engine.``.

    Raises:
        SettingError: for a value that breaks its rule, or a name that is not ``PLANNED``.
    """
    settings = _planned_default()
    for name, value in overrides.items():
        if name not in PLANNED:
            near = close_matches(name, PLANNED, most=1, cutoff=0.6)
            works = f"engine.{near[0]}" if near else f"one of: {', '.join(PLANNED)}"
            raise SettingError(f"engine.{name}", value, "the plan does not depend on such a setting.", works)
        setattr(settings, name, value)
    check_fields(settings)
    return settings


def _planned_default() -> EngineSettings:
    return EngineSettings(activation_checkpointing="full")


def as_yaml(value: Any) -> str:
    """Format a setting's value in one line, as YAML and Hydra's command line read it."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_yaml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)


def check_settings(config: Any) -> None:
    """Refuse values that no model and no number of ranks could make right.

    Raises:
        SettingError: naming the first such setting.
    """
    check_fields(config)
    for rule in _BETWEEN_SETTINGS:
        rule(config)


def _only_all_to_all(config: Any) -> None:
    for name, value, default in _given_dispatch(config):
        if config.dispatcher == "deepep" and name != "dispatcher":
            rule = "is for all_to_all: DeepEP (engine.dispatcher=deepep) sends a layer's tokens at once."
            raise SettingError(f"engine.{name}", value, rule, f"engine.{name}={default}")


def _only_whole_experts(config: Any) -> None:
    if config.dispatcher == "deepep" and config.etp_size > 1:
        rule = f"sends rows to ranks that hold experts whole, and engine.etp_size={config.etp_size} cuts them."
        raise SettingError("engine.dispatcher", "deepep", rule, "engine.dispatcher=all_to_all, or engine.etp_size=1")


def _only_with_ep(config: Any) -> None:
    for name, value, default in _given_dispatch(config):
        if config.ep_size == 1:
            rule = "no token is sent where a rank holds all experts (engine.ep_size=1)."
            raise SettingError(f"engine.{name}", value, rule, f"engine.{name}={default}, or a larger ep_size")


def _given_dispatch(config: Any) -> list[tuple[str, Any, Any]]:
    """Name, value and plain value of the settings of dispatch that ask for something."""
    plain = {"dispatch_chunks": 1, "overlap_shared_experts": False, "dispatcher": "all_to_all"}
    default, values = expert_settings(), ((name, getattr(config, name)) for name in plain)
    return [(name, value, plain[name]) for name, value in values if value not in (plain[name], default[name])]


def _only_eager_attention_over_ranks(config: Any) -> None:
    size = config.ulysses_sequence_parallel_size
    if size > 1 and config.compile_dense:
        rule = (
            "what is compiled may hold no collective, and with sequence parallelism "
            f"(engine.ulysses_sequence_parallel_size={size}) attention does."
        )
        raise SettingError("engine.compile_dense", True, rule, "engine.compile_dense=False")


def _float16_of_float32(config: Any) -> None:
    if param_dtype(config) is torch.float16 and DTYPES[config.model_dtype] is not torch.float32:
        rule = "parameters that are computed with in float16 are kept in float32."
        raise SettingError("engine.model_dtype", config.model_dtype, rule, "engine.model_dtype=fp32")


_BETWEEN_SETTINGS: Sequence[Callable[[Any], None]] = (
    _only_all_to_all,
    _only_whole_experts,
    _only_with_ep,
    _only_eager_attention_over_ranks,
    _float16_of_float32,
)
