"""The core without verl: a sharded model on this rank, and its gathered tensors."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from epfsdp2.engine.build import shard_and_load
from epfsdp2.engine.checkpoint.safetensors_reader import open_checkpoint
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.topology.dtensor import local_pieces
from epfsdp2.engine.topology.mesh import Meshes, Topology, build_meshes
from epfsdp2.rollout.plan.transfer_plan import ROUND_BUFFERS
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.transport.report import Traffic

__all__ = ["full_tensors", "sharded_model", "whole_gradients", "whole_parameters", "whole_tensor", "whole_tensors"]


def sharded_model(
    folder: Path,
    world: int | Topology,
    ep: int = 1,
    fsdp_size: int = -1,
    etp: int = 1,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    before: Callable[[nn.Module], object] = lambda model: None,
    initialize: Callable[[str, torch.Tensor, bool], bool] = lambda name, tensor, fits: False,
    finish: Callable[[nn.Module], None] | None = None,
    extend: Callable[[nn.Module], None] = lambda model: None,
    may_be_unused: str = r"(?!)",
    **options,
) -> tuple[nn.Module, Meshes]:
    """Build a model stored in ``dtype``, sharded and loaded by ``shard_and_load`` as in the engine.

    Args:
        before: called with the model before it is sharded.
        initialize, finish, may_be_unused: as in ``shard_and_load``.
        extend: as in ``build_on_meta``.
        options: of ``ShardingOptions``.
    """
    topology = world if isinstance(world, Topology) else Topology.arrange(world, ep, fsdp_size, etp)
    meshes = build_meshes(device, topology)
    config = AutoConfig.from_pretrained(folder, attn_implementation=attention)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = build_on_meta(auto, config, dtype, extend=extend)
    before(model)
    shard_and_load(
        model,
        open_checkpoint(folder),
        meshes,
        ShardingOptions(**{"param_dtype": torch.float32, **options}),
        device=device,
        device_id=device,
        initialize=initialize,
        finish=finish,
        may_be_unused=may_be_unused,
    )
    return model, meshes


def full_tensors(
    model: nn.Module,
    meshes: Meshes,
    layers: Sequence[str],
    max_bytes: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Generator[tuple[str, torch.Tensor]]:
    """Yield ``(name, full tensor)`` of each parameter and persistent buffer, with adapters merged; collective.

    Args:
        max_bytes: the most bytes of a gather, or of a tensor.
    """
    memory = (ROUND_BUFFERS + 1) * max_bytes  # as a sync in full divides it
    sync = RolloutSync(model, meshes, list(layers), dtypes or {}, SyncSettings("full", memory))
    tensors = sync.gathered(Traffic(), "merged")
    with contextlib.closing(tensors):
        for name, _, _, step, values in tensors:
            assert step == 1, f"{name} has more than {max_bytes} bytes"
            yield name, values


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full values of a DTensor on any of our meshes, on every rank; collective."""
    return whole_tensors({"": tensor})[""]


def whole_tensors(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Return the full values of DTensors on any of our meshes, and other tensors as they are; collective.

    One all-reduce per dtype, because ``full_tensor`` of each was 40 % of a test. In torch 2.13 it also raises for
    ``(_StridedShard(0), Shard(0), _StridedShard(1))``, experts over ``ep`` and ``ep_fsdp`` with gate and up over
    ``etp``.
    """
    whole = {name: None if tensor is None else tensor.detach() for name, tensor in tensors.items()}
    sharded = {name: tensor for name, tensor in whole.items() if isinstance(tensor, DTensor)}
    for dtype in dict.fromkeys(tensor.dtype for tensor in sharded.values()):
        found = {name: tensor for name, tensor in sharded.items() if tensor.dtype == dtype}
        sizes = [tensor.numel() for tensor in found.values()]
        device = next(iter(found.values())).device
        flat = torch.full((sum(sizes),), -torch.inf, dtype=dtype, device=device)
        parts = flat.split(sizes)
        whole |= {name: part.view(tensor.shape) for (name, tensor), part in zip(found.items(), parts, strict=True)}
        for name, tensor in found.items():
            for held, values in local_pieces(tensor):
                whole[name][held.slices] = values
        dist.all_reduce(flat, dist.ReduceOp.MAX)
        flat.masked_fill_(flat.isneginf(), torch.nan)  # NaN on the rank that holds the element
    return whole


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return full parameters by name; collective."""
    return whole_tensors(dict(model.named_parameters()))


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return full gradients by their parameters' names; collective."""
    return whole_tensors({name: param.grad for name, param in model.named_parameters()})
