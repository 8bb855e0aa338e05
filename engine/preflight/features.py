"""Checks that the features of a role work with its model, its device and each other.

Each check raises ``SettingError`` for the first setting that can't work. ``setting`` is the config path of the model's
node. ``facts`` is None for a model that is not on this machine; then only settings are checked.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyarrow import parquet

from ...rollout.layout.rollout_config import BLOCK
from ...rollout.servers import server_of
from ..compat import versions
from ..config.settings import param_dtype
from ..config.values import ACTOR_MODEL, DEFAULT_ATTENTION, DTYPES, attention_of, get_setting, plain
from ..errors import SettingError
from ..fsdp.ulysses import SETTING as SEQUENCE
from ..fsdp.ulysses import check_attention_splits
from ..head.causal_head import why_more_than_the_head
from ..lora.adapters import Lora
from ..lora.peft_files import check_dora, read_adapter
from ..lora.settings import LoraSettings
from ..model.families import LOOPING_INDEXERS, PADDED_BY_EAGER_ALONE, TIMES_OF_FRAMES
from ..model.value_head import as_critic, value_head
from ..model.vision import images_error, tower_parameters, why_not_images
from ..moe.deepep import check_deepep
from ..moe.find import UnsupportedModelError, experts_by_layer, find_experts
from ..moe.gemm.backends import REGISTERED
from ..moe.router.losses import check_router_logits
from ..mtp.layers import policy_experts
from ..packing.indexer_replay import indexers_of
from ..packing.sequences import why_not_packed
from ..topology.mesh import Topology, check_sequence_size
from .model import ModelFacts, check_expert_shards, facts_of

__all__ = [
    "ROUNDING",
    "check_activation_offload",
    "check_attention",
    "check_batch_invariant",
    "check_casts",
    "check_dispatcher",
    "check_fused_kernels",
    "check_images",
    "check_indexer_replay",
    "check_lora",
    "check_packing",
    "check_replay",
    "check_rounding_alone",
    "check_routers",
    "check_sequence_parallel",
    "check_tower",
    "with_value_head",
]

logger = logging.getLogger("epfsdp2")

ROUNDING = "engine.rollout_quantization_aware"
_CRITIC = "critic.model"
# Flags of transformers' classes, by the attention implementation that they announce.
_SUPPORTS = {
    DEFAULT_ATTENTION: "_supports_flash_attn",
    "sdpa": "_supports_sdpa",
    "flex_attention": "_supports_flex_attn",
}


def check_activation_offload(engine: Any, model: Any, setting: str = ACTOR_MODEL) -> None:
    """Check that layers are fully recomputed if activations are offloaded, because only layer inputs are offloaded."""
    if not get_setting(model, "enable_activation_offload"):
        return
    checkpointing = engine.activation_checkpointing
    if checkpointing == "full" or (checkpointing == "auto" and get_setting(model, "enable_gradient_checkpointing")):
        return
    name = f"{setting}.enable_activation_offload"
    rule = "offloads what goes into layers that are computed again in backward, and nothing else is kept of those."
    raise SettingError(name, True, rule, f"engine.activation_checkpointing=full, or {name}=False")


def check_attention(
    model: Mapping[str, Any], facts: ModelFacts | None, *, device: str = "cuda", setting: str = ACTOR_MODEL
) -> None:
    """Check that the attention implementation exists for this model on this device, or name one that does."""
    name = f"{setting}.override_config.attn_implementation"
    wanted = attention_of(model)
    kind = DEFAULT_ATTENTION if "flash" in wanted else wanted.rpartition("|")[2]
    accelerator = device != "cpu"
    # On an NPU transformers uses torch_npu's flash attention.
    installed = device != "cuda" or versions.installed("flash-attn") is not None
    in_class = {option: facts is None or getattr(facts.model, flag, False) for option, flag in _SUPPORTS.items()}
    here = {DEFAULT_ATTENTION: accelerator and installed, "sdpa": True, "flex_attention": accelerator}
    exist = [option for option in in_class if in_class[option] and here[option]]
    works = f"+{name}={exist[0] if exist else 'eager'}"
    if kind == DEFAULT_ATTENTION and not accelerator:
        raise SettingError(name, wanted, "flash attention (verl's default) needs an accelerator; here is none.", works)
    if facts is not None and not in_class.get(kind, True):
        raise SettingError(name, wanted, f"{facts.name} does not support it in transformers.", works)
    if kind == "flex_attention" and not accelerator:
        raise SettingError(name, wanted, "flex attention needs an accelerator; here is none.", works)
    if wanted.rpartition("|")[2] == DEFAULT_ATTENTION and not installed:
        rule = "flash attention 2 (verl's default) needs the distribution flash-attn, which is not installed."
        raise SettingError(name, wanted, rule, f"pip install 'verl[vllm,fsdp]' (it brings flash-attn), or {works}")


def check_batch_invariant(engine: Any, model: Mapping[str, Any], device: str, setting: str = ACTOR_MODEL) -> None:
    """Check that nothing is set whose result for a sequence depends on others; modules are checked when they are built.

    Experts' backends have a check of their own (``choose_backend``).
    """
    if not engine.batch_invariant:
        return
    on_gpu, needs = device != "cpu", "engine.batch_invariant=True needs"
    refused = {
        f"{setting}.use_remove_padding": (False, not model.get("use_remove_padding", True), "packed rows", True),
        f"{setting}.use_fused_kernels": (True, model.get("use_fused_kernels"), "the engine's own head", False),
        "engine.dispatcher": (
            "deepep",
            engine.dispatcher == "deepep",
            "sums in the order of a token's experts",
            "all_to_all",
        ),
        "engine.compile_dense": (True, engine.compile_dense, "kernels that do not depend on shapes", False),
        "engine.fuse_dense": (False, on_gpu and not engine.fuse_dense, "the fused norms", True),
        "engine.full_determinism": (
            False,
            on_gpu and not engine.full_determinism,
            "it, for gradients that can be repeated",
            True,
        ),
    }
    for name, (value, is_set, rule, works) in refused.items():
        if is_set:
            raise SettingError(name, value, f"{needs} {rule}.", f"{name}={works}")
    if attention_of(model).rpartition("|")[2] == "flex_attention":
        name = f"{setting}.override_config.attn_implementation"
        raise SettingError(name, "flex_attention", f"{needs} attention of one sequence at a time.", f"+{name}=sdpa")


def check_casts(engine: Any, topology: Topology) -> None:
    """Check that ``keep_casts`` has casts to keep: experts that are cast, and sharded with no other rank."""
    why = ""
    if topology.ep_fsdp > 1:
        why = f"experts are gathered over {topology.ep_fsdp} ranks"
    elif DTYPES[engine.model_dtype] is param_dtype(engine):
        why = "experts are computed with in model_dtype"
    elif engine.offload_policy or engine.rollout_quantization_aware:
        why = "offload_policy and rollout_quantization_aware leave casting to FSDP"
    if engine.keep_casts and why:
        rule = f"keeps casts of experts that a rank shares with no other, and {why}."
        raise SettingError("engine.keep_casts", True, rule, "engine.keep_casts=False")


def check_packing(model: Mapping[str, Any], facts: ModelFacts | None, setting: str = ACTOR_MODEL) -> None:
    """Check that the model keeps the sequences of a packed row apart, or that padded ones do not see later tokens."""
    if facts is None:
        return
    name, attention = f"{setting}.use_remove_padding", attention_of(model)
    if not model.get("use_remove_padding", True):
        since = PADDED_BY_EAGER_ALONE.get(facts.model.config.model_type)
        if since and attention != "eager" and versions.is_older("transformers", since):
            rule = f"pads sequences, and {facts.name} with {attention} sees later tokens before transformers {since}."
            raise SettingError(name, False, rule, f"{name}=True, or attn_implementation=eager")
        return
    if why := why_not_packed(facts.model, attention):
        raise SettingError(name, True, f"packs sequences, and in {facts.name} {why}.", f"{name}=False")


def _check_rows(model: Mapping[str, Any], rule: str, setting: str = ACTOR_MODEL) -> None:
    """Refuse padded batches because of ``rule``."""
    if not model.get("use_remove_padding", True):
        name = f"{setting}.use_remove_padding"
        raise SettingError(name, False, rule, f"{name}=True")


def check_fused_kernels(
    model: Mapping[str, Any], facts: ModelFacts | None, *, device: str = "cuda", setting: str = ACTOR_MODEL
) -> None:
    """Check that verl's fused linear cross-entropy finds the layers, and that the head only multiplies by its weight.

    Otherwise log-probs would be wrong, the first update would fail, or the role computes no log-probs.
    """
    if not model.get("use_fused_kernels", False):
        return
    name, rule = f"{setting}.use_fused_kernels", ""
    options = f"{setting}.fused_kernel_options.impl_backend"
    backend = (model.get("fused_kernel_options") or {}).get("impl_backend", "torch")
    if backend not in ("torch", "triton", "liger"):
        raise SettingError(
            options, backend, "verl has no such kernels, and would train without any.", f"{options}=torch"
        )
    if device == "cpu" and backend == "triton":
        raise SettingError(options, "triton", "Triton's kernels need an accelerator; here is none.", f"{options}=torch")
    if setting == _CRITIC:
        rule = "they compute log-probs, and a critic has none."
    elif facts is not None:
        # A process that has built an engine with these kernels has verl's forward in the class, checked before that.
        is_stock = not type(facts.model).forward.__module__.startswith("verl.")
        if is_stock and (besides := why_more_than_the_head(facts.model)):
            rule = f"they compute log-probs by the head's weight alone; in {facts.name}, {besides}."
        elif not hasattr(facts.model, "model"):
            rule = f"verl's forward calls the layers as the model's attribute `model`, which {facts.name} has not."
    if rule:
        raise SettingError(name, True, rule, f"{name}=False")


def check_sequence_parallel(
    size: int, world: int, model: Mapping[str, Any], facts: ModelFacts | None, *, setting: str = ACTOR_MODEL
) -> None:
    """Check that rows are packed, that ``size`` divides the ranks, and that the model's attention splits over it."""
    if size == 1:
        return
    check_sequence_size(world, size)
    _check_rows(model, f"it is packed rows that are cut ({SEQUENCE}={size}).", setting)
    if facts is None:
        return
    try:
        check_attention_splits(facts.model, size)
    except UnsupportedModelError as error:
        raise SettingError(SEQUENCE, size, f"can't be with {facts.name}: {error}", f"{SEQUENCE}=1") from None


def check_indexer_replay(engine: Any, model: Mapping[str, Any], module: Any) -> None:
    """Check that indexers' keys can be replayed: rows are packed, and the model (None: not known) has indexers."""
    setting = "engine.indexer_replay"
    if not engine.indexer_replay:
        return
    _check_rows(model, f"keys are replayed along a packed row ({setting}=True).")
    if module is None:
        return
    kinds = {type(indexer).__name__ for indexer in indexers_of(module).values()}
    if not kinds or kinds & LOOPING_INDEXERS:
        rule = f"{type(module).__name__} has no indexer that chooses the keys of all queries at once."
        raise SettingError(setting, True, rule, f"{setting}=False")


def check_replay(engine: Any, model: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Check that router replay has packed rows and a model whose layers each choose several experts by ``topk``."""
    mode, setting = engine.router_replay.mode, "engine.router_replay.mode"
    if mode == "disabled":
        return
    _check_rows(model, f"routes are replayed along a packed row ({setting}={mode}).")
    if facts is None:
        return
    config = facts.model.config.get_text_config()
    rule = ""
    if getattr(config, "num_experts_per_tok", 0) == 1:
        rule = "a token takes one expert, and no route can't be told from that to expert 0."
    try:
        if facts.is_dense:
            raise UnsupportedModelError("it has no experts, and a token no route")
        experts_by_layer(policy_experts(facts.model, engine.expert_plan), config.num_hidden_layers)
    except UnsupportedModelError as error:
        rule = f"{error}."
    if rule:
        raise SettingError(setting, mode, f"can't be with {facts.name}: {rule}", f"{setting}=disabled")


def check_routers(engine: Any, facts: ModelFacts) -> None:
    """Check that router losses and metrics find a router with logits in every layer."""
    names = ("router_aux_loss_coef", "router_z_loss_coef", "router_metrics")
    name = next((name for name in names if getattr(engine, name)), None)
    if name is None:
        return
    try:
        layers = facts.model.config.get_text_config().num_hidden_layers
        check_router_logits(policy_experts(facts.model, engine.expert_plan), layers)
    except UnsupportedModelError as error:
        rule = f"can't be with {facts.name}: {error}"
        raise SettingError(f"engine.{name}", getattr(engine, name), rule, "leave it out") from None


def check_images(engine: Any, model: Mapping[str, Any], rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Check that a model with a vision tower can be trained on the data's columns of images and videos.

    Args:
        rollout: also has their names and ``train_files``; only local Parquet files are read.
    """
    if facts is None or not hasattr(facts.model.config, "vision_config"):
        return
    why = why_not_images(facts.model, engine.batch_invariant, bool(model.get("use_fused_kernels")))
    has_times = rollout.get("name") and facts.model.config.model_type in TIMES_OF_FRAMES
    twice = has_times and server_of(rollout).writes_times_of_frames
    if not (why or twice):
        return
    files = plain(rollout.get("train_files") or ())
    local = [file for file in ([files] if isinstance(files, str) else files) if Path(file).is_file()]
    columns = {name for file in local for name in parquet.read_schema(file).names}
    if why and rollout.get("image_key") in columns:
        raise images_error(facts.name, why)
    if twice and (key := rollout.get("video_key")) in columns:
        rule = "verl and the rollout both write the times of a video's frames into its prompt (verl issue 5024)."
        raise SettingError("data.video_key", key, rule, "images in place of frames")


def check_tower(engine: Any, facts: ModelFacts) -> None:
    """Check that the model has a vision tower if it is to be frozen."""
    if engine.freeze_vision_tower and not tower_parameters(facts.model):
        name = "engine.freeze_vision_tower"
        raise SettingError(name, True, f"{facts.name} has no vision tower.", f"{name}=False")


def check_dispatcher(engine: Any, facts: ModelFacts, device: str) -> None:
    """Check that DeepEP can run if it is the dispatcher, and warn that this engine was never run with it."""
    if engine.dispatcher == "deepep":
        hidden, dtype = facts.model.config.get_text_config().hidden_size, param_dtype(engine)
        check_deepep(device, engine.ep_size, hidden, dtype, engine.full_determinism)
        logger.warning(
            "epfsdp2: engine.dispatcher=deepep is written to DeepEP 1.2.1's documentation and was never run with "
            "DeepEP; engine.dispatcher=all_to_all is what was tested"
        )


def with_value_head(model: Any, facts: ModelFacts | None, setting: str) -> ModelFacts | None:
    """Return a critic's facts with the value head that its worker trains beside adapters; other facts unchanged."""
    if facts is None or setting != _CRITIC or LoraSettings.of(model, setting) is None:
        return facts
    return replace(facts, model=as_critic(facts.model))


def check_lora(engine: Any, topology: Topology, model: Any, facts: ModelFacts | None, optim: Any, setting: str) -> None:
    """Check that adapters match weights of the model, and that they can be sharded and trained.

    Args:
        facts: ``facts.model`` gets the adapters; a critic's has its value head (``with_value_head``).
    """
    megatron = get_setting(model, "lora.rank")
    if megatron:
        rule = "is verl's setting for Megatron."
        raise SettingError(f"{setting}.lora.rank", megatron, rule, f"{setting}.lora_rank={megatron}")
    settings = LoraSettings.of(model, setting)
    if settings is None or facts is None:
        return
    if setting == _CRITIC:
        settings = replace(settings, value_head=value_head(facts.model.config))
    lora = Lora(facts.model, settings, engine.expert_plan)
    on_experts = [name for name, target in lora.targets.items() if target.experts is not None]
    if on_experts and engine.experts_backend.startswith(REGISTERED):
        rule = f"adds no adapter, and {on_experts[0]} gets one."
        raise SettingError("engine.experts_backend", engine.experts_backend, rule, "engine.experts_backend=auto")
    if settings.adapter is not None:
        read_adapter(settings.adapter, lora, f"{setting}.lora_adapter_path")
    check_dora(lora, setting)
    # The forward of a saved module uses copies of its weights, so nothing else may read them.
    saved = {name.rpartition(".")[0] for name in lora.saved}
    name, value = f"{setting}.lora.modules_to_save", list(settings.modules_to_save)
    head = facts.model.get_output_embeddings()
    if get_setting(model, "use_fused_kernels") and any(facts.model.get_submodule(fqn) is head for fqn in saved):
        rule = "verl's fused kernels read the head's weight, and not the copy that is trained."
        raise SettingError(name, value, rule, f"{setting}.use_fused_kernels=False, or modules without the head")
    if saved and engine.compile_dense:
        rule = "its modules exchange their weights in a forward, which torch.compile does not follow."
        raise SettingError(name, value, rule, "engine.compile_dense=False")
    adapted = facts_of(facts.model, find_experts(facts.model, engine.expert_plan) if lora.has_experts else [])
    check_expert_shards(engine, topology, adapted, optim, setting)


def check_rounding_alone(engine: Any, topology: Topology, model: Any, facts: ModelFacts | None, setting: str) -> None:
    """Check training with quantised weights, as far as it needs no rollout (``rollout.check_rounding``).

    The role has a rollout, weights are sent without adapters, and no mesh cuts a block or a row that shares a scale.
    """
    asked, off = engine.rollout_quantization_aware, f"{ROUNDING}=False"
    if not asked:
        return
    if setting == "model" and not getattr(engine, "_of_a_role", False):
        raise SettingError(ROUNDING, asked, "rounds as for a rollout, and this trainer has none.", off)
    if LoraSettings.of(model, setting) is not None:
        rule = "a rollout rounds weights with their adapters merged, and a trainer keeps the two apart."
        raise SettingError(ROUNDING, asked, rule, f"{off}, or {setting}.lora_rank=0")
    if facts is None:
        return
    if asked == "experts" and facts.is_dense:
        raise SettingError(ROUNDING, asked, f"{facts.name} has no experts.", f"{ROUNDING}=True, or {off}")
    etp, rule = topology.etp, ""
    inner = getattr(facts.model.config.get_text_config(), "moe_intermediate_size", None) or 0
    if etp > 1 and getattr(engine, "_rollout_channels", "") != "" and not facts.is_dense:
        rule = f"weights are rounded by rows, and engine.etp_size={etp} cuts those of experts."
    elif etp > 1 and inner % (etp * BLOCK):
        rule = (
            f"weights are rounded by blocks of {BLOCK} rows, and engine.etp_size={etp} cuts the {inner} of an expert "
            "inside of one."
        )
    if rule:
        raise SettingError(ROUNDING, asked, rule, f"{off}, or engine.etp_size=1")
