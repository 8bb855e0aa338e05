"""Checks that the features of a run work with its model, its device and each other."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow import parquet

from ..compat import versions
from ..config.settings import param_dtype
from ..config.values import ACTOR_MODEL, DEFAULT_ATTENTION, DTYPES, attention_of, get_setting, plain
from ..errors import SettingError
from ..fsdp.ulysses import SETTING as SEQUENCE
from ..fsdp.ulysses import check_attention_splits
from ..model.vision import images_error, tower_parameters, why_not_images
from ..moe.deepep import check_deepep
from ..moe.find import UnsupportedModelError, experts_by_layer, find_experts
from ..moe.router.losses import check_router_logits
from ..packing.sequences import why_not_packed
from ..topology.mesh import Topology, check_sequence_size
from .model_facts import ModelFacts

__all__ = [
    "check_activation_offload",
    "check_attention",
    "check_casts",
    "check_dispatcher",
    "check_distillation",
    "check_fused_kernels",
    "check_images",
    "check_packing",
    "check_replay",
    "check_routers",
    "check_routes",
    "check_sequence_parallel",
    "check_tower",
]

logger = logging.getLogger("epfsdp2")

_REPLAY = "engine.router_replay.mode"
_ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
# Config fields that change the head's logits.
_AFTER_THE_HEAD = ("logit_scale", "logits_scaling", "final_logit_softcapping")
_TOP_K_DISTILLATION = ("forward_kl_topk",)


def check_activation_offload(engine: Any, model: Any, setting: str = ACTOR_MODEL) -> None:
    """Check that layers are fully recomputed if activations are offloaded, because only layer inputs are offloaded.

    Raises:
        SettingError: activation checkpointing is not full.
    """
    if not get_setting(model, "enable_activation_offload"):
        return
    checkpointing = engine.activation_checkpointing
    if checkpointing == "full" or (checkpointing == "auto" and get_setting(model, "enable_gradient_checkpointing")):
        return
    raise SettingError(
        f"{setting}.enable_activation_offload",
        True,
        "offloads what goes into layers that are computed again in backward, and nothing else is kept of those.",
        f"engine.activation_checkpointing=full, or {setting}.enable_activation_offload=False",
    )


def check_attention(
    model: Mapping[str, Any], facts: ModelFacts | None, *, device: str = "cuda", setting: str = ACTOR_MODEL
) -> None:
    """Check that the attention implementation exists for this model on this device.

    Args:
        facts: None for a model that is not on this machine; then only the device and packages are checked.

    Raises:
        SettingError: names an implementation that works.
    """
    name = f"{setting}.override_config.attn_implementation"
    wanted = attention_of(model)
    kind = DEFAULT_ATTENTION if "flash" in wanted else wanted.rpartition("|")[2]
    accelerator = device != "cpu"
    # On an NPU transformers uses torch_npu's flash attention.
    installed = device != "cuda" or versions.installed("flash-attn") is not None
    in_class = {
        DEFAULT_ATTENTION: facts is None or facts.flash,
        "sdpa": facts is None or facts.sdpa,
        "flex_attention": facts is None or facts.flex,
    }
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


def check_casts(engine: Any, topology: Topology) -> None:
    """Check that ``keep_casts`` has casts to keep: experts that are cast, and sharded with no other rank.

    Raises:
        SettingError: the experts are gathered, are not cast, or are cast by FSDP.
    """
    left_to_fsdp = engine.offload_policy or engine.rollout_quantization_aware
    reasons = {
        f"experts are gathered over {topology.ep_fsdp} ranks": topology.ep_fsdp > 1,
        "experts are computed with in model_dtype": DTYPES[engine.model_dtype] is param_dtype(engine),
        "offload_policy and rollout_quantization_aware leave casting to FSDP": bool(left_to_fsdp),
    }
    if engine.keep_casts and True in reasons.values():
        why = next(reason for reason, holds in reasons.items() if holds)
        rule = f"keeps casts of experts that a rank shares with no other, and {why}."
        raise SettingError("engine.keep_casts", True, rule, "engine.keep_casts=False")


def check_packing(model: Mapping[str, Any], facts: ModelFacts | None, setting: str = ACTOR_MODEL) -> None:
    """Check that the model keeps the sequences of a packed row apart.

    Raises:
        SettingError: for ``use_remove_padding``.
    """
    if facts is None or not model.get("use_remove_padding", True):
        return
    why = why_not_packed(facts.model, attention_of(model))
    if why:
        name = f"{setting}.use_remove_padding"
        raise SettingError(name, True, f"packs sequences, and in {facts.name} {why}.", f"{name}=False")


def check_fused_kernels(
    model: Mapping[str, Any], facts: ModelFacts | None, *, device: str = "cuda", setting: str = ACTOR_MODEL
) -> None:
    """Check that verl's fused linear cross-entropy finds the layers, and that the head only multiplies by its weight.

    Args:
        facts: None for a model that is not on this machine; then only settings are checked.

    Raises:
        SettingError: log-probs would be wrong, the first update would fail, or the role computes no log-probs.
    """
    if not model.get("use_fused_kernels", False):
        return
    name, rule = f"{setting}.use_fused_kernels", ""
    options = f"{setting}.fused_kernel_options.impl_backend"
    if device == "cpu" and (model.get("fused_kernel_options") or {}).get("impl_backend") == "triton":
        raise SettingError(options, "triton", "Triton's kernels need an accelerator; here is none.", f"{options}=torch")
    if setting == "critic.model":
        rule = "they compute log-probs, and a critic has none."
    elif facts is not None:
        config = facts.model.config.get_text_config()
        head = facts.model.get_output_embeddings()
        besides = [f"its {key}" for key in _AFTER_THE_HEAD if getattr(config, key, None) not in (None, 0, 1)]
        besides += ["the head's bias"] if getattr(head, "bias", None) is not None else []
        if besides:
            rule = f"they compute log-probs by the head's weight alone; besides, {facts.name} has {', '.join(besides)}."
        elif not hasattr(facts.model, "model"):
            rule = f"verl's forward calls the layers as the model's attribute `model`, which {facts.name} has not."
    if rule:
        raise SettingError(name, True, rule, f"{name}=False")


def check_sequence_parallel(
    size: int, world: int, model: Mapping[str, Any], facts: ModelFacts | None, *, setting: str = ACTOR_MODEL
) -> None:
    """Check that rows are packed, that ``size`` divides the ranks, and that the model's attention splits over it.

    Args:
        size: ranks that share a row.
        facts: None for a model that is not on this machine; then its attention is not checked.

    Raises:
        SettingError: for the size, or for ``use_remove_padding``.
    """
    if size == 1:
        return
    check_sequence_size(world, size)
    if not model.get("use_remove_padding", True):
        name = f"{setting}.use_remove_padding"
        raise SettingError(name, False, f"it is packed rows that are cut ({SEQUENCE}={size}).", f"{name}=True")
    if facts is None:
        return
    try:
        check_attention_splits(facts.model, size)
    except UnsupportedModelError as error:
        raise SettingError(SEQUENCE, size, f"can't be with {facts.name}: {error}", f"{SEQUENCE}=1") from None


def check_replay(engine: Any, model: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Check that router replay has packed rows and a model whose layers each choose several experts by ``topk``.

    Args:
        facts: None for a model that is not on this machine; then only the packing is checked.

    Raises:
        SettingError: for the mode, or for ``use_remove_padding``.
    """
    mode = engine.router_replay.mode
    if mode == "disabled":
        return
    if not model.get("use_remove_padding", True):
        rule = f"routes are replayed along a packed row (engine.router_replay.mode={mode})."
        name = f"{ACTOR_MODEL}.use_remove_padding"
        raise SettingError(name, False, rule, f"{name}=True")
    if facts is None:
        return
    config = facts.model.config.get_text_config()
    rule = ""
    if getattr(config, "num_experts_per_tok", 0) == 1:
        rule = "a token takes one expert, and no route can't be told from that to expert 0."
    try:
        if facts.is_dense:
            raise UnsupportedModelError("it has no experts, and a token no route")
        experts_by_layer(find_experts(facts.model, engine.expert_plan), config.num_hidden_layers)
    except UnsupportedModelError as error:
        rule = f"{error}."
    if rule:
        raise SettingError(_REPLAY, mode, f"can't be with {facts.name}: {rule}", f"{_REPLAY}=disabled")


def check_routes(engine: Any, rollout: Mapping[str, Any]) -> None:
    """Check that exactly one source records the routes that are replayed.

    Raises:
        SettingError: for the mode, or for the rollout's setting.
    """
    mode, recorded = engine.router_replay.mode, bool(rollout.get("enable_rollout_routing_replay"))
    if mode == "R3" and not recorded:
        rule = f"{_REPLAY}=R3 replays what the rollout records."
        raise SettingError(_ROUTES, False, rule, f"{_ROUTES}=True, or {_REPLAY}=R2")
    if mode == "R2" and recorded:
        rule = f"{_REPLAY}=R2 replays what the log-probs record, and the batch has room for one."
        raise SettingError(_ROUTES, True, rule, f"{_REPLAY}=R3, or {_ROUTES}=False")
    if mode == "R2" and rollout.get("bypass_mode"):
        rule = "R2 replays what the old log-probs record, and in bypass mode nobody computes them."
        raise SettingError(_REPLAY, mode, rule, f"{_REPLAY}=R3 with {_ROUTES}=True, or {_BYPASS}=False")


def check_routers(engine: Any, model: Any, facts: ModelFacts) -> None:
    """Check that router losses and metrics find a router with logits in every layer.

    Raises:
        SettingError: for the first of their settings.
    """
    for name in ("router_aux_loss_coef", "router_z_loss_coef", "router_metrics"):
        value = getattr(engine, name)
        if not value:
            continue
        try:
            layers = facts.model.config.get_text_config().num_hidden_layers
            check_router_logits(find_experts(facts.model, engine.expert_plan), layers)
        except UnsupportedModelError as error:
            raise SettingError(
                f"engine.{name}", value, f"can't be with {facts.name}: {error}", "leave it out"
            ) from None


def check_images(rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Check that a model with a vision tower can be trained on images if the data have a column of images.

    Args:
        rollout: also has ``image_key`` and ``train_files``; only local Parquet files are read.

    Raises:
        SettingError: with the reason.
    """
    if facts is None or not hasattr(facts.model.config, "vision_config"):
        return
    why, files = why_not_images(facts.model), plain(rollout.get("train_files") or ())
    for file in [files] if isinstance(files, str) else files:
        if why and Path(file).is_file() and rollout.get("image_key") in parquet.read_schema(file).names:
            raise images_error(facts.name, why)


def check_tower(engine: Any, facts: ModelFacts) -> None:
    """Check that the model has a vision tower if it is to be frozen.

    Raises:
        SettingError: the model has no vision tower.
    """
    if engine.freeze_vision_tower and not tower_parameters(facts.model):
        name = "engine.freeze_vision_tower"
        raise SettingError(name, True, f"{facts.name} has no vision tower.", f"{name}=False")


def check_dispatcher(engine: Any, facts: ModelFacts, device: str) -> None:
    """Check that DeepEP can run if it is the dispatcher, and warn that this engine was never run with it.

    Raises:
        SettingError: see ``check_deepep``.
    """
    if engine.dispatcher == "deepep":
        hidden, dtype = facts.model.config.get_text_config().hidden_size, param_dtype(engine)
        check_deepep(device, engine.ep_size, hidden, dtype, engine.full_determinism)
        logger.warning(
            "epfsdp2: engine.dispatcher=deepep is written to DeepEP 1.2.1's documentation and was never run with "
            "DeepEP; engine.dispatcher=all_to_all is what was tested"
        )


def check_distillation(engine: Any, model: Mapping[str, Any], rollout: Mapping[str, Any]) -> None:
    """Check that verl's top-k distillation gets whole logits, for the tokens of the batch alone.

    Raises:
        SettingError: for fused kernels, or for padding.
    """
    if not rollout.get("distillation") or rollout.get("distillation_loss") not in _TOP_K_DISTILLATION:
        return
    loss = f"distillation.distillation_loss.loss_mode={rollout.get('distillation_loss')}"
    if model.get("use_fused_kernels", False):
        name = f"{ACTOR_MODEL}.use_fused_kernels"
        raise SettingError(name, True, f"{loss} needs the logits, which fused kernels never hold.", f"{name}=False")
    if engine.pad_to_length:
        rule = f"{loss} has a teacher's log-probs for each token, and none for what rounds a micro-batch up."
        raise SettingError("engine.pad_to_length", True, rule, "engine.pad_to_length=False")
