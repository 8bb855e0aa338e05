"""Checks that the rollout can serve the model, and that weights, adapters and routes can reach it.

Errors, and ``facts`` that are None, are as in ``features.py``.
"""

import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...rollout.layout.specs import Heads, SyncMode, TensorSpec
from ...rollout.plan.transfer_plan import ROUND_BUFFERS, RoundTooSmallError, Targets, make_transfer_plan, round_bytes
from ...rollout.sent_tensors import slices_of_workers, tensor_specs, with_scales
from ...rollout.servers import BACKEND, SERVERS, choose_mode, server_of
from ..config.settings import sharding_options
from ..config.values import ACTOR_MODEL, CHECKPOINT_BACKEND, DTYPES
from ..errors import SettingError
from ..fsdp.options import ShardingOptions
from ..fsdp.wrap_plan import compute_dtypes, wrap_plan
from ..lora.adapters import lora_of
from ..lora.rollout_names import has_form
from ..lora.settings import LoraSettings
from ..model.families import SCALED_BY_LENGTH
from ..model.layers import layer_names
from ..packing.positions import rotary_by_length, rotary_kinds
from ..topology.mesh import Topology
from .features import ROUNDING
from .model import ModelFacts, largest_sent

__all__ = [
    "check_adapters_alone",
    "check_algorithm",
    "check_distillation",
    "check_positions",
    "check_recorded_keys",
    "check_rollout",
    "check_rounding",
    "check_routes",
    "check_sync",
    "max_model_len",
    "rows_held_in",
    "tensor_parallel_size",
    "tensors_before_sharding",
]

logger = logging.getLogger("epfsdp2")

_ROLLOUT = "actor_rollout_ref.rollout"
_BUCKET = f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
_TP = f"{_ROLLOUT}.tensor_model_parallel_size"
_ROUTES = f"{_ROLLOUT}.enable_rollout_routing_replay"
_REPLAY = "engine.router_replay.mode"
_MEMORY = "engine.sync_megabytes"
# Advantage estimators, and the data that verl's v1 trainer lacks for them; verl's older trainer has these.
LACKING_IN_V1 = {
    "remax": "rewards of greedy answers",
    "gdpo": "rewards of each kind",
    "optimal_token_baseline": "sums of squared probabilities",
    "tir_optimal_token_baseline": "sums of squared probabilities",
}
_SHM = Path("/dev/shm")
# Left free in /dev/shm for the small segments of verl and gloo.
_SHM_MARGIN = 64 << 20


def check_sync(
    engine: Any, n_gpus: int, rollout: Mapping[str, Any], facts: ModelFacts | None, device: str, *, colocated: bool
) -> None:
    """Check that weights can reach the rollout in the configured sync mode.

    Args:
        colocated: whether each rank sends to the rollout worker beside it; else workers are on GPUs of their own.

    Raises:
        SettingError: for a family that the server can't serve, its settings and sizes, the sync mode, or rounds that
            are too small.
    """
    server, backend = server_of(rollout), rollout.get("backend") or "naive"
    if server.name not in SERVERS and backend == BACKEND:
        titles = " and ".join(known.title for known in SERVERS.values())
        rule = f"it feeds the workers of {titles}, and not those of {server.name}."
        raise SettingError(CHECKPOINT_BACKEND, backend, rule, f"{CHECKPOINT_BACKEND}=naive, or one of verl's own")
    if engine.etp_size > 1 and backend == "delta_sharded":
        rule = f"takes a shard to be one block, and with engine.etp_size={engine.etp_size} that of gate and up is two."
        raise SettingError(CHECKPOINT_BACKEND, backend, rule, f"{CHECKPOINT_BACKEND}=naive, or engine.etp_size=1")
    model, ranks = None if facts is None else facts.model, n_gpus if colocated else 0
    server.check_settings(rollout, model, engine.rollout_sync, ranks, device)
    mode, reason = _mode(engine, rollout, facts)
    server.check_mode(rollout, mode, reason, backend)
    if server.name not in SERVERS:
        logger.warning(
            "epfsdp2: nobody has run this engine with actor_rollout_ref.rollout.name=%s. It is sent full tensors under "
            "the names of checkpoints.",
            server.name,
        )
    if facts is not None and mode != "full":
        _check_plan(engine, n_gpus, rollout, facts, mode, colocated)


def _mode(engine: Any, rollout: Mapping[str, Any], facts: ModelFacts | None) -> tuple[SyncMode, str]:
    family = None if facts is None else facts.model.config.model_type
    return choose_mode(engine.rollout_sync, rollout, family, backend=rollout.get("backend") or "naive")


def _check_plan(
    engine: Any, n_gpus: int, rollout: Mapping[str, Any], facts: ModelFacts, kind: SyncMode, colocated: bool
) -> None:
    """Check that the tensor-parallel size divides the model, and that a row of the largest tensor fits into a round."""
    server, heads, megabytes = server_of(rollout), Heads.of(facts.model.config), engine.sync_megabytes
    placement = server.rollout_of(rollout)
    topology = Topology.arrange(n_gpus, engine.ep_size, engine.fsdp_size, engine.etp_size)
    tensors = tensors_before_sharding(
        facts.model, topology, engine.expert_shard_dim, engine.expert_plan, _sent_itemsizes(engine, facts)
    )
    tensors = with_scales(tensors, placement, heads.family)
    slices_of, workers = slices_of_workers(tensors, placement, heads), placement.workers
    # One replica is enough for separate workers, because all replicas have the same needs.
    targets = Targets.colocated(topology, workers) if colocated else Targets.separate(range(workers), topology)
    limit, layers = round_bytes(megabytes << 20), layer_names(facts.model)
    try:
        make_transfer_plan(tensors, layers, topology, targets, slices_of, limit)
    except RoundTooSmallError as error:
        rule = f"{error.what} is {error.needed} bytes on a rank, and a {kind} sync holds {ROUND_BUFFERS} times that."
        raise SettingError(_MEMORY, megabytes, rule, f"{_MEMORY}={-(-ROUND_BUFFERS * error.needed >> 20)}") from None
    except ValueError as error:
        rule, works = f"{server.title} can't cut this model so: {error}", "a smaller one that divides"
        raise SettingError(_TP, placement.tp, rule, works) from None


def check_rollout(engine: Any, n_gpus: int, rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Check that a bucket in shared memory holds the largest tensor, and that /dev/shm holds the buckets.

    Each local rank has one bucket. Only this node's /dev/shm is read; the others are assumed to be the same.

    Args:
        n_gpus: ranks of the trainer, each with a bucket; 0 for separate rollouts, whose nodes are not known.

    Raises:
        SettingError: names a size that works.
    """
    megabytes = int(rollout["update_weights_bucket_megabytes"])
    needed = 1
    if facts is not None:
        name, nbytes = largest_sent(facts.model, _sent_itemsizes(engine, facts), rollout.get("name") or "")
        needed = -(-nbytes >> 20)
        if nbytes > megabytes << 20:
            sent = f"is {nbytes} bytes as it is sent, and goes through shared memory in one piece."
            raise SettingError(_BUCKET, megabytes, f"the largest tensor, {name}, {sent}", f"{_BUCKET}={needed}")
    if not n_gpus or not _SHM.is_dir():
        return
    ranks = min(n_gpus, int(rollout.get("n_gpus_per_node") or n_gpus))
    free = shutil.disk_usage(_SHM).free
    if ranks * (megabytes << 20) + _SHM_MARGIN > free:
        rule = (
            f"each of the {ranks} ranks of a node keeps one bucket in {_SHM}, where {free >> 20} MB are free "
            f"({_SHM_MARGIN >> 20} MB of them are kept for others)."
        )
        fits = max(0, free - _SHM_MARGIN) // ranks >> 20
        works = f"a /dev/shm of {-(-(ranks * (needed << 20) + _SHM_MARGIN) >> 20)} MB or more (docker run --shm-size)"
        if fits >= needed:
            works = f"{_BUCKET}={fits}, or less down to {needed}"
        raise SettingError(_BUCKET, megabytes, rule, works)


def _sent_itemsizes(engine: Any, facts: ModelFacts) -> dict[str, int]:
    """Return the bytes per element of each parameter as it is sent: in the forward's dtype if that is narrower."""
    stored, dtypes = DTYPES[engine.model_dtype].itemsize, compute_dtypes(facts.model, sharding_options(engine))
    return {name: min(stored, dtype.itemsize) for name, dtype in dtypes.items()}


def tensors_before_sharding(
    model: nn.Module,
    topology: Topology,
    expert_shard_dim: int | str = "auto",
    expert_plan: Mapping[str, int] | None = None,
    itemsize: Mapping[str, int] | int | None = None,
) -> list[TensorSpec]:
    """Return ``sent_tensors.tensor_specs`` of this model as if it was sharded; it may be on meta.

    Raises:
        UnsupportedModelError, SettingError: as ``parallelize``.
    """
    plan = wrap_plan(model, ShardingOptions(expert_plan=expert_plan))
    cuts = {name: unit.cuts(name, topology, expert_shard_dim) for unit in plan for name in unit.shapes}
    return tensor_specs(model, itemsize, {name: cuts.get(name, ()) for name, _ in model.named_parameters()})


def check_adapters_alone(model: Any, rollout: Mapping[str, Any], facts: ModelFacts | None, device: str) -> None:
    """Check adapters that are sent to the rollout without the base weights (``lora.merge=False``).

    verl's own checkpoint engines send merged weights all the same. With them any adapter can be trained.
    ``facts.model`` has the adapters (``features.check_lora``).
    """
    if not model.get("lora_rank") or not rollout.get("name") or (model.get("lora") or {}).get("merge"):
        return
    setting, works = f"{ACTOR_MODEL}.lora.merge", f"{ACTOR_MODEL}.lora.merge=True"
    server = server_of(rollout)
    if not server.serves_adapters:
        rule = f"{server.name} is sent adapters merged into the weights, and in no other way."
        raise SettingError(setting, False, rule, works)
    settings = LoraSettings.of(model, ACTOR_MODEL)
    backend = rollout.get("backend") or "naive"
    is_merged = backend not in ("naive", BACKEND)
    if is_merged:
        logger.warning(
            "epfsdp2: %s=%s sends all weights in every sync, with adapters merged into them; %s sends adapters alone",
            CHECKPOINT_BACKEND,
            backend,
            BACKEND,
        )
    unserved = [name for name in server.lacking if getattr(settings, name)]
    if unserved and not is_merged:
        raise SettingError(setting, False, f"{server.title} serves no adapter with {unserved[0]}.", works)
    if facts is None or facts.is_dense:
        return
    lora = lora_of(facts.model)
    adapted = [name for name, target in lora.targets.items() if target.experts is not None] if lora is not None else []
    some = model.get("target_modules")
    if device in server.no_expert_adapters and (adapted or not some or isinstance(some, str)):
        what = f"{adapted[0]} gets one" if adapted else "it prepares them unless target_modules is a list"
        rule = f"{server.title}'s {device.upper()} build has no kernels for adapters of experts, and {what}."
        works += f", or {ACTOR_MODEL}.target_modules=[q_proj,k_proj,v_proj,o_proj]"
        raise SettingError(setting, False, rule, works)
    unknown = [name for name in adapted if not has_form(facts.model, name, server.stacked_adapters)]
    if unknown and not is_merged:
        rule = f"it is not known in which form {server.title} takes adapters of {unknown[0]} of {facts.name}."
        raise SettingError(setting, False, rule, works)


def rows_held_in(rollout: Mapping[str, Any]) -> str:
    """Return the rollout's quantisation with per-row scales ('fp8', 'int8'), or '' (``rollout/layout/specs.py``)."""
    return server_of(rollout).rollout_of(rollout).channels


def tensor_parallel_size(rollout: Mapping[str, Any]) -> int:
    """Return the number of workers that share each tensor of the rollout's model."""
    return server_of(rollout).rollout_of(rollout).tp


def check_rounding(engine: Any, rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Check that the trainer quantises the weights that it sends, if it trains with quantised weights."""
    asked = engine.rollout_quantization_aware
    if not asked:
        return
    server, able = server_of(rollout), " or ".join(one.title for one in SERVERS.values() if one.quantised)
    quantization = f"{_ROLLOUT}.quantization"
    works = f"{quantization}=fp8 with a {able} that takes slices, or {ROUNDING}=False"
    if not server.rollout_of(rollout).is_quantised:
        found = (
            f"{quantization}={rollout.get('quantization')}" if server.quantised else f"{_ROLLOUT}.name={server.name}"
        )
        rule = f"weights are rounded as they are for a {able} in FP8 or INT8, and {found}."
        raise SettingError(ROUNDING, asked, rule, works)
    mode, reason = _mode(engine, rollout, facts)
    if mode != "sliced":
        whole = f"engine.rollout_sync={engine.rollout_sync} has {server.title}'s workers quantise whole tensors."
        rule = f"weights are rounded as slices of them are sent. {reason or whole}"
        raise SettingError(ROUNDING, asked, rule, works)


def check_routes(engine: Any, rollout: Mapping[str, Any]) -> None:
    """Check that exactly one source records the routes that are replayed."""
    mode, recorded = engine.router_replay.mode, bool(rollout.get("enable_rollout_routing_replay"))
    if mode == "R3" and not recorded:
        rule = f"{_REPLAY}=R3 replays what the rollout records."
        raise SettingError(_ROUTES, False, rule, f"{_ROUTES}=True, or {_REPLAY}=R2")
    if mode == "R2" and recorded:
        rule = f"{_REPLAY}=R2 replays what the log-probs record, and the batch has room for one."
        raise SettingError(_ROUTES, True, rule, f"{_REPLAY}=R3, or {_ROUTES}=False")
    if mode == "R2" and rollout.get("bypass_mode"):
        rule = "R2 replays what the old log-probs record, and in bypass mode nobody computes them."
        works = f"{_REPLAY}=R3 with {_ROUTES}=True, or algorithm.rollout_correction.bypass_mode=False"
        raise SettingError(_REPLAY, mode, rule, works)


def check_recorded_keys(engine: Any, rollout: Mapping[str, Any]) -> None:
    """Check that the trainer computes old log-probs, and keeps the keys that are recorded with them."""
    if not engine.indexer_replay:
        return
    rule, works = "", "engine.indexer_replay=False"
    if rollout.get("bypass_mode"):
        rule = "old log-probs record the keys of indexers, and in bypass mode nobody computes them."
        works = f"algorithm.rollout_correction.bypass_mode=False, or {works}"
    elif rollout.get("use_v1") is False or rollout.get("separate_nodes") is not None:
        rule = "of verl's trainers the v1 trainers alone keep the keys that old log-probs record."
    if rule:
        raise SettingError("engine.indexer_replay", True, rule, works)


def check_algorithm(rollout: Mapping[str, Any]) -> None:
    """Refuse algorithms that verl's v1 trainer would stop at, or compute wrongly, after the first rollout (0.9.1)."""
    if not rollout.get("use_v1") or rollout.get("separate_nodes") is not None:  # other trainers are no v1 trainers
        return
    works, estimator = "trainer.use_v1=False", rollout.get("adv_estimator")
    if lacking := LACKING_IN_V1.get(str(estimator)):
        rule = f"verl's v1 trainer has no {lacking}, and would end after the first rollout."
        raise SettingError("algorithm.adv_estimator", estimator, rule, works)
    if rollout.get("use_pf_ppo") and estimator == "gae":
        rule = "verl's v1 trainer gives the advantages of drawn samples to other samples."
        raise SettingError("algorithm.use_pf_ppo", True, rule, works)


def check_distillation(engine: Any, model: Mapping[str, Any], rollout: Mapping[str, Any]) -> None:
    """Check that verl's top-k distillation gets whole logits, for the tokens of the batch alone."""
    if not rollout.get("distillation") or rollout.get("distillation_loss") != "forward_kl_topk":
        return
    loss = "distillation.distillation_loss.loss_mode=forward_kl_topk"
    if model.get("use_fused_kernels", False):
        name = f"{ACTOR_MODEL}.use_fused_kernels"
        raise SettingError(name, True, f"{loss} needs the logits, which fused kernels never hold.", f"{name}=False")
    if engine.pad_to_length:
        rule = f"{loss} has a teacher's log-probs for each token, and none for what rounds a micro-batch up."
        raise SettingError("engine.pad_to_length", True, rule, "engine.pad_to_length=False")


def max_model_len(rollout: Mapping[str, Any]) -> Any:
    """Return the sequence length by which a rollout chooses its frequencies at start (``longest_start``)."""
    return server_of(rollout).longest_start(rollout) if rollout.get("name") else None


def check_positions(rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Check that the rollout's rotary embedding equals the trainer's if frequencies depend on the length."""
    if facts is None or rollout.get("name") not in SERVERS:
        return
    for module in rotary_by_length(facts.model):
        most = module.config.max_position_embeddings
        for layers, kind in rotary_kinds(module).items():
            if kind not in ("dynamic", "longrope"):
                continue
            parameters = module.config.rope_parameters
            parameters = parameters if layers is None else parameters[layers]
            length = server_of(rollout).check_rotations(kind, parameters, most, rollout)
            if kind == "longrope" and type(module).__name__ not in SCALED_BY_LENGTH:
                own = getattr(module, "attention_scaling" if layers is None else f"{layers}_attention_scaling")
                _check_scale(own, parameters, most, length, facts)


def _check_scale(own: float, parameters: Mapping[str, Any], most: int, length: int, facts: ModelFacts) -> None:
    """Check longrope's scale: rollouts ignore ``factor`` and ``attention_factor``, which transformers reads."""
    original = parameters["original_max_position_embeddings"]
    times = most / original
    scale = math.sqrt(1 + math.log(times) / math.log(original)) if times > 1 else 1.0
    scale = parameters.get("long_mscale" if length > original else "short_mscale", scale)
    if abs(own - scale) > 1e-6:
        rule = (
            f"transformers scales the rotations of its longrope by {own:.6g}, as attention_factor or factor say, and "
            f"the rollout, which reads max_position_embeddings or mscale, by {scale:.6g}."
        )
        works = f"a config.json with factor={times:g}, or without all of these"
        raise SettingError(ACTOR_MODEL, facts.name, rule, works)
