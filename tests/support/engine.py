"""The core without verl: a sharded model on this rank."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from epfsdp2.engine.checkpoint.load import load_weights
from epfsdp2.engine.checkpoint.safetensors_reader import open_checkpoint
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import build_on_meta, materialize
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.topology.mesh import Meshes, Topology, build_meshes

__all__ = ["sharded_model"]


def sharded_model(
    folder: Path,
    world: int | Topology,
    ep: int = 1,
    fsdp_size: int = -1,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    before: Callable[[nn.Module], object] = lambda model: None,
    initialize: Callable[[str, torch.Tensor, bool], bool] = lambda name, tensor, fits: False,
    **options,
) -> tuple[nn.Module, Meshes]:
    """Build, shard and load a checkpoint, stored in ``dtype``; ``options`` are those of ``ShardingOptions``.

    Args:
        before: is handed the model before it is sharded.
        initialize: as ``load_weights``'s.
    """
    topology = world if isinstance(world, Topology) else Topology.arrange(world, ep, fsdp_size)
    meshes = build_meshes("cpu", topology)
    config = AutoConfig.from_pretrained(folder, attn_implementation=attention)
    model = build_on_meta(AutoModelForCausalLM, config, dtype)
    before(model)
    parallelize(model, meshes, ShardingOptions(**{"param_dtype": torch.float32, **options}))
    materialize(model, "cpu")
    load_weights(model, open_checkpoint(folder), meshes, initialize)
    return model, meshes
