"""Write one rank's part of a checkpoint without a collective.

A replica (HSDP) holds each shard once, so that the ranks of one replica, or of several that together hold all of it,
write a whole checkpoint; ``state.py`` says what is in one. Left out are the weights in Hugging Face's layout and the
adapters as peft saves them, which are made of all shards.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from ..checkpoint.atomic_folder import file_facts, file_names
from ..checkpoint.state import HF, RNG, SHARDS, STATE, Snapshot
from ..topology.dcp import ShardWriter, chunked
from ..topology.dtensor import shard_steps

__all__ = ["write_rank"]


def write_rank(
    snapshot: Snapshot, folder: Path, rank: int, position: int, describe: Callable[[Path], None]
) -> dict[str, dict[str, int]]:
    """Write the shards of a rank, and what is written once if it is the first of its replica.

    Args:
        snapshot: in host memory.
        folder: may be written into by other ranks at the same time.
        position: of the rank in its replica; others at the same position hold the same shards.
        describe: writes config and tokenizer into a folder.

    Returns:
        Size and checksum of each file, by its name in ``folder``.
    """
    own = folder / f"rank-{rank}"
    for name in (SHARDS, RNG, HF):
        (own / name).mkdir(parents=True)
    tensors = {name: tensor for name, tensor in snapshot.tensors.items() if _writes(position, tensor)}
    if tensors:
        writer = ShardWriter(str(own / SHARDS), number=rank + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that one process saves
            dcp.save(chunked(tensors), storage_writer=writer, no_dist=True)
    if snapshot.random:
        save_file(snapshot.random, own / RNG / f"{rank:05d}.safetensors")
    if position == 0:
        (own / STATE).write_text(json.dumps(snapshot.facts))
        describe(own / HF)
    files = {name: file_facts(own / name, sync=True) for name in file_names(own)}
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).replace(folder / name)
    shutil.rmtree(own)
    return files


def _writes(position: int, tensor: torch.Tensor) -> bool:
    """Return whether a rank of a replica writes its shard: of ranks that hold the same one, the first."""
    if not isinstance(tensor, DTensor):
        return position == 0
    sharded = {"dp_replicate", *(step.axis for step in shard_steps(tensor))}
    mesh = tensor.device_mesh
    return all(mesh.get_local_rank(axis) == 0 for axis in mesh.mesh_dim_names or () if axis not in sharded)
