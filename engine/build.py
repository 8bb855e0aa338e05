"""Build a sharded model: parallelize, match the checkpoint, allocate, load, verify.

It does not depend on verl. ``integration/engine.py`` calls it, and tests call it with tiny models
(``tests/support/engine/sharded.py``).
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .checkpoint.load import load_weights, match_weights, verify_experts
from .checkpoint.safetensors_reader import CheckpointFiles
from .dense.products import prepare
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
        device_id: device of the shards, unless FSDP's CPU offload policy is on; ``device`` is the meshes' type.
        initialize, may_be_unused: see ``match_weights``.
        finish: fills further parameters, e.g. adapters, after loading.
        progress: show a progress bar on this rank.

    Returns:
        Names of the checkpoint's tensors that the model does not have.

    Raises:
        UninitializedError: a parameter or buffer got no value.
    """
    if options.batch_invariant:
        prepare(device)
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
