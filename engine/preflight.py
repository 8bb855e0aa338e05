"""What can be known to be wrong before a worker is started.

``check_run`` is called on the driver, before Ray starts; ``check_training`` is the part of it that ``sft_trainer``,
which has no driver, can call on each rank before a byte of weights is read. Everything is computed from the model's
``config.json``: it is built on the meta device, which takes a second and no memory.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet

from ..rollout.choice import check_placement, choose_stream, rollout_of
from ..rollout.placement import Heads, Need, Tensor, needs
from ..rollout.plan import ROUND_BUFFERS, Targets, make_plan, round_bytes
from ..rollout.source import tensors_before_sharding
from . import versions
from .adapter_files import read_adapter
from .checkpoint import KNOWN_CONTENTS
from .errors import SettingError
from .experts.find import UnsupportedModelError, experts_by_layer, find_experts
from .lora import Lora
from .lora_settings import LoraSettings
from .mesh import Topology, check_sequence_size
from .model_facts import ACTOR_MODEL, ModelFacts, inspect_model, overrides_of, plain
from .optimizer_settings import ACTOR_OPTIM, check_optimizer, wants_muon
from .packing import why_not_packed
from .parallelize import layer_names
from .placement import check_experts_divide, ep_fsdp_dim
from .router_losses import check_watchable
from .sequence_parallel import SETTING as SEQUENCE
from .sequence_parallel import check_attention_splits
from .towers import images_refused, why_not_images

__all__ = [
    "DTYPES",
    "check_activation_offload",
    "check_attention",
    "check_checkpoint",
    "check_distillation",
    "check_experts",
    "check_fused_kernels",
    "check_lora",
    "check_images",
    "check_model_settings",
    "check_replay",
    "check_rollout",
    "check_routers",
    "check_routes",
    "check_run",
    "check_sequence_parallel",
    "check_stream",
    "check_training",
    "check_versions",
]

logger = logging.getLogger("epfsdp2")

# What a setting of the engine may call a dtype. No float16: there is no loss scaling here, and its reduction would be
# divided twice where a shard group has one rank.
DTYPES = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
# How a user calls the checkpoint's node, by how they call the model's.
_CHECKPOINTS = {
    ACTOR_MODEL: "actor_rollout_ref.actor.checkpoint",
    "critic.model": "critic.checkpoint",
    "model": "checkpoint",
}
_OPTIMIZERS = {ACTOR_MODEL: ACTOR_OPTIM, "critic.model": "critic.optim", "model": "optim"}
_BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_MEMORY = "engine.sync_megabytes"
_REPLAY = "engine.router_replay.mode"
_ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
# Families that choose experts in another way than all others.
_NOT_BY_TOPK = {"phimoe": "its routers choose by a maximum, and another one over what is left."}
# What a config may ask to be done with a head's logits.
_AFTER_THE_HEAD = ("logit_scale", "logits_scaling", "final_logit_softcapping")
_TOP_K_DISTILLATION = ("forward_kl_topk",)
_SHM = Path("/dev/shm")
# Left free in /dev/shm besides the buckets: verl's and gloo's own segments are small.
_SHM_MARGIN = 64 << 20
_DEFAULT_ATTENTION = "flash_attention_2"  # verl 0.9.1, workers/config/model.py
# verl's model settings that ask for what this engine does not do, and the value that does not ask for it.
_UNSUPPORTED = {
    "use_liger": False,
    "tiled_mlp.enabled": False,
    "mtp.enable": False,
}


def check_run(
    engine: Any,
    n_gpus: int,
    model: Mapping[str, Any],
    rollout: Mapping[str, Any],
    *,
    checkpoint: Mapping[str, Any] | None = None,
    optim: Any = None,
    device: str = "cuda",
    ipc: bool = True,
) -> None:
    """All checks of a run of verl's RL trainer.

    Args:
        engine: the engine's settings (``EPFSDP2EngineConfig`` or anything with its fields).
        n_gpus: ranks of the trainer.
        model: verl's model settings.
        rollout: ``n_gpus_per_node``, ``backend`` and ``update_weights_bucket_megabytes``, and under their own names
            those of verl's rollout settings that say how it is placed (``rollout/choice.py`` reads them).
        checkpoint: the actor's checkpoint settings.
        optim: the actor's optimizer settings.
        device: verl's device name; ``cpu`` where there is no accelerator.
        ipc: whether weights reach vLLM through device memory; through /dev/shm otherwise.

    Raises:
        SettingError: for the first setting that can't work.
    """
    check_versions(rollout.get("name"))
    _check_road(rollout)
    check_routes(engine, rollout)
    facts = check_training(engine, n_gpus, model, checkpoint=checkpoint, optim=optim, device=device)
    _check_merged(model, rollout)
    check_replay(engine, model, facts)
    check_distillation(engine, model, rollout)
    check_images(rollout, facts)
    colocated = (rollout.get("backend") or "naive") == "naive"
    if rollout.get("name"):
        check_stream(engine, n_gpus, rollout, facts, colocated=colocated)
    if not ipc and rollout.get("name"):
        check_rollout(engine, n_gpus if colocated else 0, rollout, facts)


def check_training(
    engine: Any,
    world: int,
    model: Mapping[str, Any],
    *,
    checkpoint: Mapping[str, Any] | None = None,
    optim: Any = None,
    device: str = "cuda",
    setting: str = ACTOR_MODEL,
) -> ModelFacts | None:
    """Checks of the engine and the model, without a rollout.

    Args:
        world: number of ranks.
        checkpoint: the role's checkpoint settings.
        optim: the role's optimizer settings; None where there is none.
        setting: how the user calls the model's node: ``model`` in ``sft_trainer``.

    Returns:
        What is known of the model; None if it is not on this machine yet.

    Raises:
        SettingError: for the first setting that can't work.
    """
    topology = Topology.plan(world, engine.ep_size, engine.fsdp_size)
    check_model_settings(model, setting)
    check_activation_offload(engine, model, setting)
    check_checkpoint(checkpoint or {}, _CHECKPOINTS.get(setting, "checkpoint"))
    facts = inspect_model(model, setting, engine.expert_plan, engine.fp32_modules)
    if facts is not None:
        check_experts(topology, facts, engine.expert_shard_dim)
        check_routers(engine, model, facts)
    check_attention(model, facts, device=device, setting=setting)
    check_fused_kernels(model, facts, device=device, setting=setting)
    check_lora(engine, topology, model, facts, optim, setting)
    check_sequence_parallel(engine.ulysses_sequence_parallel_size, world, model, facts, setting=setting)
    if optim is not None:
        check_optimizer(optim, _OPTIMIZERS.get(setting, "optim"))
    return facts


def check_model_settings(model: Any, setting: str = ACTOR_MODEL) -> None:
    """Say no to what verl's model settings can ask for and this engine would silently not do.

    Args:
        model: verl's model settings, as a mapping or as ``HFModelConfig``.
        setting: how the user calls their node.

    Raises:
        SettingError: for the first of them.
    """
    for name, off in _UNSUPPORTED.items():
        value = _setting(model, name)
        if value:
            raise SettingError(
                f"{setting}.{name}", value, "is not supported by this engine.", f"{setting}.{name}={off}"
            )


def check_activation_offload(engine: Any, model: Any, setting: str = ACTOR_MODEL) -> None:
    """What is offloaded is what whole layers are computed again from.

    Raises:
        SettingError: layers are not computed again whole.
    """
    if not _setting(model, "enable_activation_offload"):
        return
    checkpointing = engine.activation_checkpointing
    if checkpointing == "full" or (checkpointing == "auto" and _setting(model, "enable_gradient_checkpointing")):
        return
    raise SettingError(
        f"{setting}.enable_activation_offload",
        True,
        "offloads what goes into layers that are computed again in backward, and nothing else is kept of those.",
        f"engine.activation_checkpointing=full, or {setting}.enable_activation_offload=False",
    )


def _setting(model: Any, name: str) -> Any:
    """A setting of verl's model node by its dotted name; None if it has no such."""
    value = model
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def check_checkpoint(checkpoint: Mapping[str, Any], setting: str) -> None:
    """What is saved and loaded has to be something that there is.

    Raises:
        SettingError: with what there is.
    """
    for key in ("save_contents", "load_contents"):
        contents = plain(checkpoint.get(key) or ())
        wanted = {contents} if isinstance(contents, str) else set(contents)
        unknown = sorted(str(entry) for entry in wanted - KNOWN_CONTENTS)
        if unknown:
            known = ",".join(sorted(KNOWN_CONTENTS))
            raise SettingError(
                f"{setting}.{key}",
                contents,
                f"there is no {' and no '.join(unknown)} in a checkpoint.",
                f"{setting}.{key}=[{known}], or some of them",
            )
    if checkpoint.get("async_save") and setting == _CHECKPOINTS["critic.model"]:
        rule = "a step is complete, and named the latest, when the actor's part is; the critic's has to be there then."
        raise SettingError(f"{setting}.async_save", True, rule, f"{setting}.async_save=False")


def check_versions(rollout_name: str | None) -> None:
    """Refuse a missing verl, Ray or vLLM; warn of versions that nobody tried.

    Raises:
        SettingError: for the first distribution that is missing.
    """
    for name in ("verl", "ray", "torch", "transformers", "vllm"):
        if name == "vllm" and rollout_name != "vllm":
            continue
        version = versions.installed(name)
        if version is None and name == "vllm":
            works = "pip install 'epfsdp2[gpu]', or on a machine without a GPU 'epfsdp2[cpu]'"
            raise SettingError("actor_rollout_ref.rollout.name", "vllm", "vLLM is not installed.", works)
        if version is None:
            raise SettingError(
                name, None, f"{name} is not installed.", f"pip install '{name}{versions.tested()[name]}'"
            )
        if warning := versions.untested(name):
            logger.warning("epfsdp2: %s", warning)


def check_experts(topology: Topology, facts: ModelFacts, shard_dim: int | str = "auto") -> None:
    """``ep_size`` has to divide the number of experts of every layer, and ``ep_fsdp`` what is left of them.

    Args:
        shard_dim: ``engine.expert_shard_dim``.

    Raises:
        SettingError: with the values that divide the ranks too.
    """
    check_experts_divide(facts.experts, topology, facts.name)
    for shape, ep_dim in facts.stacked:
        ep_fsdp_dim(shape, topology, shard_dim, ep_dim)


def check_lora(
    engine: Any,
    topology: Topology,
    model: Any,
    facts: ModelFacts | None,
    optim: Any = None,
    setting: str = ACTOR_MODEL,
) -> None:
    """Adapters have to be of weights that there are, and something that can be trained and cut.

    Args:
        facts: None for a model that is not on this machine: what does not depend on it is checked. Its model gets the
            adapters.

    Raises:
        SettingError: for the first setting that can't work.
    """
    megatron = model.get("lora") if isinstance(model, Mapping) else getattr(model, "lora", None)
    if megatron and megatron.get("rank"):
        rule = "is verl's setting for Megatron."
        raise SettingError(f"{setting}.lora.rank", megatron["rank"], rule, f"{setting}.lora_rank={megatron['rank']}")
    settings = LoraSettings.of(model, setting)
    if settings is None:
        return
    if setting == "critic.model":
        rule = "a critic's head is trained whole, and adapters leave everything else as it is."
        raise SettingError(f"{setting}.lora_rank", settings.rank, rule, f"{setting}.lora_rank=0")
    if optim is not None and wants_muon(optim):
        rule = f"orthogonalises whole matrices, and with {setting}.lora_rank={settings.rank} thin ones are trained."
        name = f"{_OPTIMIZERS.get(setting, 'optim')}.optimizer"
        raise SettingError(name, "Muon", rule, f"{name}=AdamW")
    if facts is None:
        return
    lora = Lora(facts.model, settings, engine.expert_plan)
    if settings.adapter is not None:
        read_adapter(settings.adapter, lora.targets, f"{setting}.lora_adapter_path")
    for info in find_experts(facts.model, engine.expert_plan):
        for name, dim in info.ep_dims.items():
            ep_fsdp_dim(info.module.get_parameter(name).shape, topology, engine.expert_shard_dim, dim)


def _check_merged(model: Any, rollout: Mapping[str, Any]) -> None:
    """vLLM is handed weights. What it does with an adapter of experts, it does in kernels that only GPUs have."""
    lora = model.get("lora") or {}
    if model.get("lora_rank") and rollout.get("name") and not lora.get("merge"):
        rule = "this engine hands adapters to vLLM merged into the weights, and in no other way."
        raise SettingError(f"{ACTOR_MODEL}.lora.merge", False, rule, f"{ACTOR_MODEL}.lora.merge=True")


def check_attention(
    model: Mapping[str, Any], facts: ModelFacts | None, *, device: str = "cuda", setting: str = ACTOR_MODEL
) -> None:
    """The attention has to exist for this model on this device, and to keep packed sequences apart.

    Eager attention gets no mask between the sequences of a packed row: they see each other, silently (gpt-oss, packed
    in pairs: log-probs off by 0.95).

    Args:
        facts: None for a model that is not on this machine: what does not depend on it is checked.

    Raises:
        SettingError: with an implementation that works.
    """
    name = f"{setting}.override_config.attn_implementation"
    wanted = str(overrides_of(model).get("attn_implementation", _DEFAULT_ATTENTION))
    kind = _DEFAULT_ATTENTION if "flash" in wanted else wanted.rpartition("|")[2]
    accelerator = device != "cpu"
    # On an NPU transformers takes torch_npu's.
    installed = device != "cuda" or versions.installed("flash-attn") is not None
    in_class = {
        _DEFAULT_ATTENTION: facts is None or facts.flash,
        "sdpa": facts is None or facts.sdpa,
        "flex_attention": facts is None or facts.flex,
    }
    here = {_DEFAULT_ATTENTION: accelerator and installed, "sdpa": True, "flex_attention": accelerator}
    packs = [option for option in in_class if in_class[option] and here[option]]
    works = f"+{name}={packs[0]}" if packs else f"+{name}=eager with {setting}.use_remove_padding=False"
    if kind == _DEFAULT_ATTENTION and not accelerator:
        raise SettingError(name, wanted, "flash attention (verl's default) needs an accelerator; here is none.", works)
    if facts is not None and not in_class.get(kind, True):
        raise SettingError(name, wanted, f"{facts.name} does not support it in transformers.", works)
    if kind == "flex_attention" and not accelerator:
        raise SettingError(name, wanted, "flex attention needs an accelerator; here is none.", works)
    if wanted.rpartition("|")[2] == _DEFAULT_ATTENTION and not installed:
        rule = "flash attention 2 (verl's default) needs the distribution flash-attn, which is not installed."
        raise SettingError(name, wanted, rule, f"pip install 'verl[vllm,fsdp]' (it brings flash-attn), or {works}")
    if kind == "eager" and model.get("use_remove_padding", True):
        rule = (
            f"eager attention does not keep packed sequences apart, and {setting}.use_remove_padding=True packs them."
        )
        raise SettingError(name, wanted, rule, works)
    if facts is not None and model.get("use_remove_padding", True):
        why = why_not_packed(facts.model.config, flash=kind == _DEFAULT_ATTENTION)
        if why:
            packing = f"{setting}.use_remove_padding"
            raise SettingError(packing, True, f"packs sequences, and in {facts.name} {why}.", f"{packing}=False")


def check_fused_kernels(
    model: Mapping[str, Any], facts: ModelFacts | None, *, device: str = "cuda", setting: str = ACTOR_MODEL
) -> None:
    """verl's fused linear cross-entropy multiplies by the head's weight, and does nothing else that a head may do.

    Args:
        facts: None for a model that is not on this machine: what does not depend on it is checked.

    Raises:
        SettingError: where log-probs would silently be others, and where there are none.
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
    if rule:
        raise SettingError(name, True, rule, f"{name}=False")


def check_distillation(engine: Any, model: Mapping[str, Any], rollout: Mapping[str, Any]) -> None:
    """verl's top-k distillation reads whole logits, one for each token of the batch.

    Raises:
        SettingError: for the setting that leaves it without them.
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


def check_sequence_parallel(
    size: int, world: int, model: Mapping[str, Any], facts: ModelFacts | None, *, setting: str = ACTOR_MODEL
) -> None:
    """Rows have to be packed, the ranks to divide, and the model to mix tokens by attention over heads that divide.

    Args:
        size: ranks that share a row.
        facts: None for a model that is not on this machine: what does not depend on it is checked.

    Raises:
        SettingError: for the size, or for the packing.
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
    """Router replay needs packed rows, and a model whose layers each choose several experts by ``topk``.

    Args:
        facts: None for a model that is not on this machine: what does not depend on it is checked.

    Raises:
        SettingError: for the mode, or for the packing.
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
    rule = _NOT_BY_TOPK.get(config.model_type, "")
    if getattr(config, "num_experts_per_tok", 0) == 1:
        rule = "a token takes one expert, and no route can't be told from that to expert 0."
    try:
        experts_by_layer(find_experts(facts.model, engine.expert_plan), config.num_hidden_layers)
    except UnsupportedModelError as error:
        rule = f"{error}."
    if rule:
        raise SettingError(_REPLAY, mode, f"can't be with {facts.name}: {rule}", f"{_REPLAY}=disabled")


def check_routers(engine: Any, model: Any, facts: ModelFacts) -> None:
    """Losses and metrics of the routers need layers that each have one, and losses its logits.

    Raises:
        SettingError: for the first of their settings.
    """
    for name in ("router_aux_loss_coef", "router_z_loss_coef", "router_metrics"):
        value = getattr(engine, name)
        if not value:
            continue
        if name != "router_metrics" and _setting(model, "lora_rank"):
            rule = "adapters may be a part of a router's logits, and the loss would not see it."
            raise SettingError(f"engine.{name}", value, rule, f"engine.{name}=0")
        try:
            layers = facts.model.config.get_text_config().num_hidden_layers
            check_watchable(find_experts(facts.model, engine.expert_plan), layers)
        except UnsupportedModelError as error:
            raise SettingError(
                f"engine.{name}", value, f"can't be with {facts.name}: {error}", "leave it out"
            ) from None


def check_routes(engine: Any, rollout: Mapping[str, Any]) -> None:
    """The routes that are replayed have to come from somewhere, and from one place.

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


def check_images(rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Data with a column of images need a model that can be trained on them; a model without a tower ignores them.

    Args:
        rollout: besides, ``train_files``, of which local Parquet files are looked at, and ``image_key``.

    Raises:
        SettingError: with the reason.
    """
    if facts is None or not hasattr(facts.model.config, "vision_config"):
        return
    why, files = why_not_images(facts.model), plain(rollout.get("train_files") or ())
    for file in [files] if isinstance(files, str) else files:
        if why and Path(file).is_file() and rollout.get("image_key") in parquet.read_schema(file).names:
            raise images_refused(facts.name, why)


def check_rollout(engine: Any, n_gpus: int, rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Where weights travel through shared memory: the bucket has to hold the largest tensor, and /dev/shm the buckets.

    Each local rank has one bucket. Only this node's /dev/shm can be looked at; the others are taken to be alike.

    Args:
        n_gpus: ranks of the trainer that keep a bucket; 0 where other processes do, on nodes that are not known.

    Raises:
        SettingError: with a size that works.
    """
    megabytes = int(rollout["update_weights_bucket_megabytes"])
    needed = 1
    if facts is not None:
        name, elements = facts.largest
        nbytes = elements * DTYPES[engine.model_dtype].itemsize
        needed = -(-nbytes >> 20)
        if nbytes > megabytes << 20:
            raise SettingError(
                _BUCKET,
                megabytes,
                f"the largest tensor, {name}, is {nbytes} bytes in {engine.model_dtype}, and goes through shared "
                "memory in one piece.",
                f"{_BUCKET}={needed}",
            )
    if not n_gpus or not _SHM.is_dir():
        return
    ranks = min(n_gpus, int(rollout.get("n_gpus_per_node") or n_gpus))
    free = shutil.disk_usage(_SHM).free
    if ranks * (megabytes << 20) + _SHM_MARGIN > free:
        fits = max(0, free - _SHM_MARGIN) // ranks >> 20
        more = f"a /dev/shm of {-(-(ranks * (needed << 20) + _SHM_MARGIN) >> 20)} MB or more (docker run --shm-size)"
        raise SettingError(
            _BUCKET,
            megabytes,
            f"each of the {ranks} ranks of a node keeps one bucket in {_SHM}, where {free >> 20} MB are free "
            f"({_SHM_MARGIN >> 20} MB of them are kept for others).",
            f"{_BUCKET}={fits}, or less down to {needed}" if fits >= needed else more,
        )


def check_stream(
    engine: Any, n_gpus: int, rollout: Mapping[str, Any], facts: ModelFacts | None, *, colocated: bool = True
) -> None:
    """The rollout has to be one that weights can reach, and by the stream that was asked for.

    Args:
        colocated: whether each rank feeds the worker beside it; the workers are other processes otherwise.

    Raises:
        SettingError: for the placement, the stream, or a round that is too small for it.
    """
    config = None if facts is None else facts.model.config.get_text_config()
    check_placement(rollout, n_gpus if colocated else 0, config)
    kind, _ = choose_stream(
        engine.rollout_sync,
        rollout,
        None if facts is None else facts.model.config.model_type,
        untested_vllm=versions.untested("vllm"),
        backend=rollout.get("backend") or "naive",
    )
    if config is None or facts is None or kind == "full":
        return
    placement, heads = rollout_of(rollout), Heads.of(config)

    def needs_of(tensor: Tensor, worker: int) -> list[Need]:
        return needs(tensor, placement, worker % placement.workers, heads, kind)

    topology = Topology.plan(n_gpus, engine.ep_size, engine.fsdp_size)
    tensors = tensors_before_sharding(
        facts.model, topology, engine.expert_shard_dim, engine.expert_plan, _sent_itemsize(engine)
    )
    try:
        # Of workers that are other processes one replica is enough: any other has the same needs.
        targets = Targets(n_gpus if colocated else placement.workers, colocated)
        plan = make_plan(tensors, layer_names(facts.model), topology, targets, needs_of, 1)
    except ValueError as error:
        rule, works = f"vLLM can't cut this model so: {error}", "a smaller one that divides"
        raise SettingError(_TP, placement.tp, rule, works) from None
    least, name = plan.least_limit
    megabytes = engine.sync_megabytes
    if least > round_bytes(megabytes << 20):
        rule = f"one row of {name} is {least} bytes on a rank, and a {kind} sync holds {ROUND_BUFFERS} times that."
        raise SettingError(_MEMORY, megabytes, rule, f"{_MEMORY}={-(-ROUND_BUFFERS * least >> 20)}")


def _sent_itemsize(engine: Any) -> int:
    """Bytes of an element as it is sent: that of the forward's dtype, where it is narrower than the parameters'."""
    wanted = (engine.mixed_precision or {}).get("param_dtype", engine.dtype)
    return min(DTYPES[name].itemsize for name in (wanted, engine.model_dtype))


def _check_road(rollout: Mapping[str, Any]) -> None:
    """Weights leave under names, and along a road, that vLLM's workers take."""
    name = rollout.get("name")
    if name not in (None, "vllm"):
        rule = "this engine hands weights over under vLLM's names."
        raise SettingError("actor_rollout_ref.rollout.name", name, rule, "actor_rollout_ref.rollout.name=vllm")
