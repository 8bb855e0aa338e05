"""From a model on the meta device to one that is sharded, loaded and verified.

The sequence is parallelize, compare with the checkpoint, allocate, load, verify.

It knows nothing of verl. ``integration/engine.py`` calls it with the model as verl's settings have it, and the tests
with a tiny one (``tests/support/engine/sharded.py``), so that what is tested is the sequence that runs.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .checkpoint.load import load_weights, match_weights, verify_experts
from .checkpoint.safetensors_reader import CheckpointFiles
from .fsdp.options import ShardingOptions
from .model.meta import check_initialized, materialize
from .parallelize import parallelize
from .topology.mesh import Meshes
from .topology.rank_consistency import raise_on_all_ranks

__all__ = ["shard_and_load"]


def shard_and_load(
    model: nn.Module,
    files: CheckpointFiles,
    meshes: Meshes,
    options: ShardingOptions,
    *,
    device: str,
    device_id: Any,
    initialize: Callable[[str, torch.Tensor, bool], bool] = lambda name, tensor, fits: False,
    finish: Callable[[nn.Module], None] | None = None,
    progress: bool = False,
    may_be_unused: str = r"(?!)",
) -> list[str]:
    """Shard ``model``, which is on the meta device, and fill this rank's shards from a checkpoint; collective.

    Args:
        device: type of the device of the meshes.
        device_id: where shards are allocated, but for FSDP's CPU offload policy.
        initialize: fills a parameter that the checkpoint has nothing for (``match_weights``).
        finish: fills what is left, e.g. adapters, after the checkpoint has been read.
        progress: whether this rank shows how far it is.
        may_be_unused: matches names that the checkpoint may have and the model not (``match_weights``).

    Returns:
        Names of the checkpoint's tensors that have no place in the model.

    Raises:
        UninitializedError: something has been filled by nothing.
        Exception: whatever ``parallelize``, ``match_weights``, ``load_weights`` and ``verify_experts`` raise.
    """
    if device == "cuda" and importlib.util.find_spec("triton") is not None:
        from .compat.triton_cache import compile_once_per_node

        compile_once_per_node()
    parallelize(model, meshes, options)
    matched = match_weights(model, files, meshes, initialize, may_be_unused)
    materialize(model, device_id, shards="cpu" if options.cpu_offload else None)
    unused = load_weights(model, matched, meshes, progress)
    if finish is not None:
        finish(model)
    check_initialized(model, device)
    with raise_on_all_ranks(device):
        verify_experts(model, matched)
    return unused
