"""The work of one rank that the tests measure, each with its preparation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from epfsdp2.engine.checkpoint import export_hf
from epfsdp2.engine.checkpoint.safetensors_writer import Entry, write_file
from epfsdp2.engine.checkpoint.stored_shards import (
    MODEL,
    OPTIMIZER,
    StoredTensor,
    first_held,
    overlapping,
    shard_files,
    shard_reads,
    stored_tensors,
)
from epfsdp2.engine.optim.muon_partition import Bucket, Layout, build_buckets, matrix_groups
from epfsdp2.engine.topology.dtensor import checkpoint_tensors, shard_steps
from epfsdp2.engine.topology.index_ranges import shard_ranges
from epfsdp2.recipes.plan import cli
from epfsdp2.recipes.plan.cards import config_of
from epfsdp2.recipes.plan.meshes import Request
from epfsdp2.recipes.plan.roofline import Cluster
from tests.support.scale import Size

__all__ = [
    "checkpoint_of",
    "cluster_of",
    "matrix_buckets",
    "plan_export",
    "plan_resume",
    "plan_save",
    "request_for",
    "state_of",
    "write_headers",
]

_BUCKET_BYTES = 64 << 20  # Muon's default


def matrix_buckets(model: nn.Module) -> list[Bucket]:
    found = []
    for group in matrix_groups(model):
        layout = Layout(group["parts"], group["out_dim"], group["interleaved"])
        found += build_buckets(group["params"], layout, torch.bfloat16, _BUCKET_BYTES)
    return found


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model and of AdamW's states by their names in a checkpoint."""
    tensors = checkpoint_tensors(model)
    moments = {f"{n}.{key}": p for n, p in model.named_parameters() for key in ("exp_avg", "exp_avg_sq")}
    return {MODEL + n: t for n, t in tensors.items()} | {OPTIMIZER + n: t for n, t in moments.items()}


def plan_save(state: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, Any]:
    return shard_files(first_held(state, rank), rank + 1, world)


def write_headers(folder: Path, size: Size, state: dict[str, torch.Tensor]) -> int:
    """Write the files that all ranks of a size save, sparse: headers alone. Return the number of shards."""
    steps, shards = {name: shard_steps(tensor) for name, tensor in state.items()}, 0
    for rank in range(size.world):
        at, header, places, end = size.topology.coordinate(rank), {}, {}, 0
        for name, tensor in state.items():
            (held,) = shard_ranges(tensor.shape, steps[name], at)
            if held.numel and (steps[name] or rank == 0):
                nbytes = 2 * held.numel
                header[name] = {"dtype": "BF16", "shape": held.shape, "data_offsets": (end, end + nbytes)}
                places[name] = {"saved_offsets": held.low}
                end += nbytes
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places)}
        text = json.dumps({**header, "__metadata__": metadata}).encode()
        with (folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        shards += len(places)
    return shards


def checkpoint_of(folder: Path, size: Size, with_states: bool = True) -> tuple[nn.Module, Path, int]:
    """Return a sharded model, a folder with the headers of its checkpoint, and the number of shards."""
    model = size.shard(size.build())
    state = state_of(model)
    if not with_states:
        state = {name: tensor for name, tensor in state.items() if name.startswith(MODEL)}
    own = folder / str(size)
    own.mkdir(exist_ok=True)
    return model, own, write_headers(own, size, state)


def plan_resume(model: nn.Module, folder: Path) -> tuple[dict[str, StoredTensor], dict[Path, list[tuple]]]:
    stored = stored_tensors(folder, overlapping(checkpoint_tensors(model)))
    return stored, shard_reads(stored, state_of(model))


def plan_export(model: nn.Module, folder: Path, rank: int, world: int) -> list[tuple[Sequence[Entry], str]]:
    """Return the files that a rank exports, with their entries; write the index."""
    planned = []

    def record(path: Path, entries: Sequence[Entry], values: Any) -> None:
        planned.append((entries, path.name))

    with mock.patch.object(export_hf, write_file.__name__, record):
        dtypes = dict.fromkeys(checkpoint_tensors(model))
        export_hf.write_hf_weights(model, stored_tensors(folder), folder, dtypes, share=(rank, world))
    return planned


def request_for(size: Size) -> Request:
    """Return what ``recipes.plan`` asks the planner for."""
    return cli.request_of(cli.parse(["--model", size.model]), config_of(size.model))


def cluster_of(world: int, gib: float = 141) -> Cluster:
    return Cluster(nodes=world // 8, gpus=8, gib=gib)
