"""Check before a worker starts that weights can reach the rollout, with its parallel sizes and the memory there is."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...rollout.cleanup import report_leftovers
from ...rollout.layout.rollout_config import (
    COMPRESSED,
    OVERRIDES,
    VLLM,
    compressed_kind,
    overridden,
    quantisation_settings,
    rollout_of,
)
from ...rollout.layout.sglang_layout import RECORDS_NO_ROUTES
from ...rollout.layout.sync_mode import BACKEND, check_rollout_parallelism, check_sglang_sizes, choose_mode
from ...rollout.layout.trainer_tensors import tensor_specs_of
from ...rollout.layout.transfer_plan import (
    ROUND_BUFFERS,
    RoundTooSmallError,
    Targets,
    make_transfer_plan,
    round_bytes,
)
from ...rollout.layout.vllm_layout import Heads, SyncMode, TensorSpec
from ...rollout.quantise.scales import slices_of_workers, with_scales
from ..compat import versions
from ..declared.derived import sharding_options
from ..errors import SettingError, close_matches
from ..fsdp.wrap_plan import compute_dtypes, cuts_before_sharding
from ..model.families import CLASS_IN_VLLM, CLASS_OF_SLICES, NOT_IN_VLLM, WHOLE_IN_VLLM
from ..model.layers import layer_names
from ..settings.values import CHECKPOINT_BACKEND, DTYPES
from ..topology.mesh import Topology
from .model_facts import ModelFacts, largest_sent

__all__ = [
    "check_graphs",
    "check_other_rollout",
    "check_rollout",
    "check_stream",
    "report_leftovers",
    "tensors_before_sharding",
]

logger = logging.getLogger("epfsdp2")

# The rollouts besides vLLM that a committed run shows.
_RUN_WITH = ("sglang",)
_BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_MEMORY = "engine.sync_megabytes"
_QUANTIZATION = "actor_rollout_ref.rollout.quantization"
_SHM = Path("/dev/shm")
_ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_NO_TOKENIZER = "actor_rollout_ref.rollout.skip_tokenizer_init"
# From here on mla_attention.py copies into W_UV and W_UK_T (replace_parameter, vllm#48251); in 0.24 it assigns them.
_KEEPS_LATENT_MATRICES = ">=0.27.1"
# What vLLM's kinds of quantisation call the layers that they leave alone, and what vLLM fuses layers to.
_IGNORED = ("ignored_layers", "modules_to_not_convert", "ignore")
_FUSED = ("qkv_proj", "gate_up_proj")
# Left free in /dev/shm besides the buckets: verl's and gloo's own segments are small.
_SHM_MARGIN = 64 << 20


def check_other_rollout(
    engine: Any, n_gpus: int, rollout: Mapping[str, Any], facts: ModelFacts | None, *, colocated: bool = True
) -> None:
    """Check the weight sync to a rollout that is not vLLM: full tensors, or slices where it is known to load them.

    Args:
        colocated: see ``check_stream``.

    Raises:
        SettingError: for a setting that asks for more, or for slices that can't be planned.
    """
    name, backend = rollout["name"], rollout.get("backend") or "naive"
    if name != "sglang" and backend == BACKEND:
        rule = f"it feeds the workers of vLLM and SGLang, and not those of {name}."
        raise SettingError(CHECKPOINT_BACKEND, backend, rule, f"{CHECKPOINT_BACKEND}=naive, or one of verl's own")
    family = None if facts is None else facts.model.config.model_type
    untested = versions.unknown_layout(name)
    kind, _ = choose_mode(engine.rollout_sync, rollout, family, untested=untested, backend=backend)
    if name == "sglang":
        check_sglang_sizes(rollout)
        if rollout.get("enable_rollout_routing_replay") and family in RECORDS_NO_ROUTES:
            rule = f"SGLang does not say which layer the routes of a {family} are of."
            raise SettingError(_ROUTES, True, rule, f"{_ROUTES}=False, or actor_rollout_ref.rollout.name=vllm")
        if rollout.get("enable_rollout_routing_replay") and rollout.get("skip_tokenizer_init"):
            rule = f"with {_ROUTES}=True SGLang sends routes as text, which verl 0.9.1 reads where this is False."
            raise SettingError(_NO_TOKENIZER, True, rule, f"{_NO_TOKENIZER}=False")
    if name not in _RUN_WITH:
        logger.warning(
            "epfsdp2: nobody has run this engine with actor_rollout_ref.rollout.name=%s. It is sent full tensors under "
            "the names of checkpoints.",
            name,
        )
    if facts is not None and kind != "full":
        _check_plan(engine, n_gpus, rollout, facts, kind, colocated)


def check_graphs(rollout: Mapping[str, Any], facts: ModelFacts | None, device: str) -> None:
    """Check that CUDA graphs compute with the weights of the last sync.

    Raises:
        SettingError: the model has multi-head latent attention, whose matrices the installed vLLM puts elsewhere in
            every sync.
    """
    latent = facts is not None and getattr(facts.model.config.get_text_config(), "kv_lora_rank", None)
    if device != "cuda" or not latent or rollout.get("enforce_eager"):
        return
    if not versions.vllm_in(_KEEPS_LATENT_MATRICES):
        rule = (
            f"vllm {versions.installed('vllm')} allocates the matrices of latent attention anew in every weight sync, "
            "and CUDA graphs go on with the old memory, so rollouts would be silently wrong."
        )
        setting = "actor_rollout_ref.rollout.enforce_eager"
        raise SettingError(setting, False, rule, f"{setting}=True, or vllm{_KEEPS_LATENT_MATRICES}")


def check_stream(
    engine: Any, n_gpus: int, rollout: Mapping[str, Any], facts: ModelFacts | None, *, colocated: bool = True
) -> None:
    """Check that weights can reach a vLLM rollout, in the sync mode that the user asked for.

    Args:
        colocated: whether each rank feeds the worker beside it; the workers are other processes otherwise.

    Raises:
        SettingError: for a family that vLLM can't serve, the parallel sizes, the sync mode, or rounds too small for it.
    """
    family = None if facts is None else facts.model.config.model_type
    if facts is not None:
        _check_family(facts.model.config, rollout, engine.rollout_sync)
    config = None if facts is None else facts.model.config.get_text_config()
    check_rollout_parallelism(rollout, n_gpus if colocated else 0, config)
    quantised = quantisation_settings(rollout)
    if facts is not None:
        _check_ignored(dict(quantised).get(OVERRIDES), facts)
    if quantised and not colocated:
        setting, value = quantised[0]
        backend = rollout.get("backend")
        rule = f"vLLM's quantising loader takes checkpoints' names, and {CHECKPOINT_BACKEND}={backend} carries others."
        raise SettingError(setting, value, rule, f"{CHECKPOINT_BACKEND}=naive, or {setting}=null")
    kind, reason = choose_mode(
        engine.rollout_sync,
        rollout,
        family,
        untested=versions.unknown_layout(),
        backend=rollout.get("backend") or "naive",
    )
    compressed = dict(quantised).get(OVERRIDES)
    if kind == "full" and isinstance(compressed, Mapping) and compressed.get("quant_method") == COMPRESSED:
        why = compressed_kind(compressed)[1] or reason or "its values and scales are sent in slices alone."
        rule = f"vLLM quantises nothing for {COMPRESSED}, and full tensors have no scales: {why}"
        raise SettingError(OVERRIDES, compressed, rule, f"{_QUANTIZATION}=fp8")
    if facts is not None and kind != "full":
        _check_plan(engine, n_gpus, rollout, facts, kind, colocated)


def _check_family(config: Any, rollout: Mapping[str, Any], requested: str) -> None:
    """Check that the installed vLLM can serve the model's family, in this sync mode and on so many workers.

    Raises:
        SettingError: it can't, unless the user overrides the config that vLLM reads.
    """
    family, overrides = config.model_type, overridden(rollout)
    releases, rule, named = NOT_IN_VLLM.get(family, ("", "", ""))
    if rule and named not in overrides and versions.vllm_in(releases):
        raise SettingError("actor_rollout_ref.model", family, rule, "another family; SFT trains this one")
    classes, known = overrides.get("architectures") or config.architectures, CLASS_IN_VLLM.get(family)
    setting = f"{VLLM}.hf_overrides.architectures"
    if known and classes and known not in classes:
        rule = f"vLLM can run this family as {known} alone, as published checkpoints call the class."
        raise SettingError(setting, list(classes), rule, f"{setting}=[{known}]")
    releases, known = CLASS_OF_SLICES.get(family, ("", ""))
    if known and classes and known not in classes and requested != "full" and versions.vllm_in(releases):
        rule = "for this name the installed vLLM has a class of its own, whose layout is not known here."
        raise SettingError(setting, list(classes), rule, f"{setting}=[{known}], or engine.rollout_sync=full")
    releases, rule = WHOLE_IN_VLLM.get(family, ("", ""))
    tp = rollout_of(rollout).tp
    if rule and tp > 1 and versions.vllm_in(releases):
        raise SettingError(_TP, tp, rule, f"{_TP}=1")


def _check_ignored(quantization: Any, facts: ModelFacts) -> None:
    """Check that layers which vLLM is not to quantise are there; it takes any names, and quantises what they miss.

    Raises:
        SettingError: for the first that is not.
    """
    modules = dict(facts.model.named_modules())
    for key in _IGNORED if isinstance(quantization, Mapping) else ():
        for name in quantization.get(key) or ():
            parent, _, own = name.rpartition(".")
            if name.startswith("re:") or name in modules or (parent in modules and own in _FUSED):
                continue
            rule = f"{facts.name} has no such layer, so that vLLM would quantise the one that was meant."
            near = close_matches(name, [*modules, *(f"{layer}.{own}" for layer in modules for own in _FUSED)], most=1)
            raise SettingError(f"{OVERRIDES}.{key}", name, rule, f"one like {near}" if near else "leave it out")


def _check_plan(
    engine: Any, n_gpus: int, rollout: Mapping[str, Any], facts: ModelFacts, kind: SyncMode, colocated: bool
) -> None:
    """Check that this tensor-parallel size cuts the model, and that a row of the largest tensor fits into a round."""
    placement, heads, megabytes = rollout_of(rollout), Heads.of(facts.model.config), engine.sync_megabytes
    topology = Topology.arrange(n_gpus, engine.ep_size, engine.fsdp_size, engine.etp_size)
    tensors = tensors_before_sharding(
        facts.model, topology, engine.expert_shard_dim, engine.expert_plan, _sent_itemsizes(engine, facts)
    )
    tensors = with_scales(tensors, placement, heads.family)
    slices_of, workers = slices_of_workers(tensors, placement, heads), placement.workers
    # Of workers that are other processes one replica is enough: any other has the same needs.
    targets = Targets.colocated(topology, workers) if colocated else Targets.separate(range(workers), topology)
    limit, layers = round_bytes(megabytes << 20), layer_names(facts.model)
    try:
        is_gather = colocated and workers == 1
        make_transfer_plan(tensors, layers, topology, targets, slices_of, limit, is_gather=is_gather)
    except RoundTooSmallError as error:
        rule = f"{error.what} is {error.needed} bytes on a rank, and a {kind} sync holds {ROUND_BUFFERS} times that."
        raise SettingError(_MEMORY, megabytes, rule, f"{_MEMORY}={-(-ROUND_BUFFERS * error.needed >> 20)}") from None
    except ValueError as error:
        server = "SGLang" if placement.server == "sglang" else "vLLM"
        rule, works = f"{server} can't cut this model so: {error}", "a smaller one that divides"
        raise SettingError(_TP, placement.tp, rule, works) from None


def check_rollout(engine: Any, n_gpus: int, rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Check that a bucket in shared memory holds the largest tensor, and that /dev/shm holds the buckets.

    Each local rank has one bucket. Only this node's /dev/shm can be looked at; the others are assumed to be the same.

    Args:
        n_gpus: ranks of the trainer that keep a bucket; 0 where other processes do, on nodes that are not known.

    Raises:
        SettingError: names a size that works.
    """
    megabytes = int(rollout["update_weights_bucket_megabytes"])
    needed = 1
    if facts is not None:
        name, nbytes = largest_sent(facts.model, _sent_itemsizes(engine, facts))
        needed = -(-nbytes >> 20)
        if nbytes > megabytes << 20:
            raise SettingError(
                _BUCKET,
                megabytes,
                f"the largest tensor, {name}, is {nbytes} bytes as it is sent, and goes through shared memory in one "
                "piece.",
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


def _sent_itemsizes(engine: Any, facts: ModelFacts) -> dict[str, int]:
    """Return the bytes of an element of each parameter as it is sent: in the forward's dtype if that is narrower."""
    stored, dtypes = DTYPES[engine.model_dtype].itemsize, compute_dtypes(facts.model, sharding_options(engine))
    return {name: min(stored, dtype.itemsize) for name, dtype in dtypes.items()}


def tensors_before_sharding(
    model: nn.Module,
    topology: Topology,
    expert_shard_dim: int | str = "auto",
    expert_plan: Mapping[str, int] | None = None,
    itemsize: Mapping[str, int] | int | None = None,
) -> list[TensorSpec]:
    """Return what ``trainer_tensors.sharded_tensor_specs`` will return once this model is sharded; it may be on meta.

    Raises:
        UnsupportedModelError, SettingError: as ``parallelize``.
    """
    cuts = cuts_before_sharding(model, topology, expert_shard_dim, expert_plan)
    return list(tensor_specs_of(model, cuts, itemsize))
