"""Quantised slices of a sharded model beside those of the whole weights."""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from epfsdp2.engine.model.layers import layer_names
from epfsdp2.rollout.layout.slice_names import parse_slice, rows_of
from epfsdp2.rollout.layout.vllm_layout import Heads, Rollout
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.worker_weights import WorkerWeights
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import reference_model
from tests.support.rollout.units import Quantise, worker_parameters

__all__ = ["Sent", "bits", "check_slices_of_the_whole"]


class Sent(NamedTuple):
    """What a sync sent to the worker of this rank."""

    sync: RolloutSync
    weights: WorkerWeights
    parameters: dict[str, torch.Tensor]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_slices_of_the_whole(folder: Path, mesh: tuple[int, int], rollout: Rollout, quantise: Quantise) -> Sent:
    """Compare, bit for bit, what a sync sends with the parts of whole weights in bfloat16 that ``quantise`` rounds.

    Args:
        mesh: ``ep`` and ``etp``.
        quantise: returns the values and the scales of a weight.
    """
    model, meshes = sharded_model(folder, dist.get_world_size(), mesh[0], etp=mesh[1])
    dtypes = dict.fromkeys((name for name, _ in model.named_parameters()), torch.bfloat16)
    sync = RolloutSync(model, meshes, layer_names(model), dtypes, SyncSettings("sliced", 1 << 21))
    worker = dist.get_rank() % rollout.workers
    weights = sync.worker_weights("sliced", rollout, worker, is_quantised=True)
    assert weights.is_quantised_here
    model = reference_model(folder)
    full = {name: weight.detach().bfloat16() for name, weight in model.named_parameters()}
    wanted = worker_parameters(full, rollout, worker, Heads.of(model.config), quantise)
    found = {name: torch.zeros_like(values) for name, values in wanted.items()}
    sent = dict.fromkeys(wanted, 0)
    for name, values in weights.tensors():
        parameter, first, step = parse_slice(name)
        assert values.dtype == wanted[parameter].dtype, name
        found[parameter][rows_of(values, first, step)] = values
        sent[parameter] += values.numel()
    for parameter, values in wanted.items():
        assert sent[parameter] == values.numel(), parameter
        assert torch.equal(bits(found[parameter]), bits(values)), (parameter, mesh, rollout)
        layout = weights.planned_layouts()[worker][parameter]
        assert layout.startswith(str(list(values.shape))), (parameter, layout)
    return Sent(sync, weights, found)
