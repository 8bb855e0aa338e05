"""Checks that weights can reach the rollout, with its parallel sizes and the memory of the node."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...rollout.layout.specs import Heads, SyncMode, TensorSpec
from ...rollout.plan.transfer_plan import (
    ROUND_BUFFERS,
    RoundTooSmallError,
    Targets,
    make_transfer_plan,
    round_bytes,
)
from ...rollout.sent_tensors import slices_of_workers, tensor_specs, with_scales
from ...rollout.servers import BACKEND, SERVERS, choose_mode, server_of
from ..config.settings import sharding_options
from ..config.values import CHECKPOINT_BACKEND, DTYPES
from ..errors import SettingError
from ..fsdp.wrap_plan import compute_dtypes, cuts_before_sharding
from ..model.layers import layer_names
from ..topology.mesh import Topology
from .model_facts import ModelFacts, largest_sent

__all__ = ["check_rollout", "check_sync", "tensors_before_sharding"]

logger = logging.getLogger("epfsdp2")

_BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_MEMORY = "engine.sync_megabytes"
_SHM = Path("/dev/shm")
# Left free in /dev/shm for the small segments of verl and gloo.
_SHM_MARGIN = 64 << 20


def check_sync(
    engine: Any,
    n_gpus: int,
    rollout: Mapping[str, Any],
    facts: ModelFacts | None,
    device: str,
    *,
    colocated: bool = True,
) -> None:
    """Check that weights can reach the rollout in the configured sync mode.

    Args:
        device: verl's device name.
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
    model, ranks = None if facts is None else facts.model, n_gpus if colocated else 0
    server.check_settings(rollout, model, engine.rollout_sync, ranks, device)
    family = None if facts is None else facts.model.config.model_type
    mode, reason = choose_mode(engine.rollout_sync, rollout, family, backend=backend)
    server.check_mode(rollout, mode, reason, backend)
    if server.name not in SERVERS:
        logger.warning(
            "epfsdp2: nobody has run this engine with actor_rollout_ref.rollout.name=%s. It is sent full tensors under "
            "the names of checkpoints.",
            server.name,
        )
    if facts is not None and mode != "full":
        _check_plan(engine, n_gpus, rollout, facts, mode, colocated)


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
    cuts = cuts_before_sharding(model, topology, expert_shard_dim, expert_plan)
    return tensor_specs(model, itemsize, cuts)
