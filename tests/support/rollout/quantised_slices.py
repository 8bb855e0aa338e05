"""Quantised slices of a sharded model beside those of the whole weights."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from epfsdp2.engine.model.layers import layer_names
from epfsdp2.rollout.layout.slice_names import parse_slice
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.servers import is_quantised, slices_of_scales, target_slices
from epfsdp2.rollout.sync import RolloutSync, RolloutWeights, SyncSettings
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import reference_model

__all__ = ["Sent", "bits", "check_slices_of_the_whole"]

Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# By vLLM's names: where each piece of a parameter begins, and its values.
Pieces = dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]


class Sent(NamedTuple):
    """What a sync sent to the worker of this rank."""

    sync: RolloutSync
    weights: RolloutWeights
    pieces: Pieces


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_slices_of_the_whole(folder: Path, mesh: tuple[int, int], rollout: Rollout, quantise: Quantise) -> Sent:
    """Compare, bit for bit, what a sync sends with the slices of whole weights in bfloat16 that ``quantise`` rounds.

    Args:
        mesh: ``ep`` and ``etp``.
        quantise: returns the values and the scales of a weight.
    """
    model, meshes = sharded_model(folder, dist.get_world_size(), mesh[0], etp=mesh[1])
    dtypes = dict.fromkeys((name for name, _ in model.named_parameters()), torch.bfloat16)
    sync = RolloutSync(model, meshes, layer_names(model), dtypes, SyncSettings("sliced", 1 << 21))
    worker = dist.get_rank() % rollout.workers
    weights = sync.weights().for_worker("sliced", rollout, worker, is_quantised=True)
    assert weights.is_quantised_here
    sent: Pieces = {}
    for name, values in weights.tensors():
        parameter, corner, _ = parse_slice(name)
        sent.setdefault(parameter, []).append((corner, torch.empty_like(values).copy_(values)))
    expected = _expected(folder, rollout, worker, quantise)
    assert sent.keys() == expected.keys()
    for parameter, pieces in expected.items():
        found, wanted = _assembled(sent[parameter]), _assembled(pieces)
        assert found.dtype == wanted.dtype, parameter
        assert torch.equal(bits(found), bits(wanted)), (parameter, mesh, rollout)
        layout = weights.planned_layouts()[worker][parameter]
        assert layout.startswith(str(list(wanted.shape))), (parameter, layout)
    return Sent(sync, weights, sent)


def _expected(folder: Path, rollout: Rollout, worker: int, quantise: Quantise) -> Pieces:
    model, found = reference_model(folder), {}
    heads = Heads.of(model.config)
    for name, weight in model.named_parameters():
        tensor, weight = TensorSpec(name, tuple(weight.shape), 1), weight.detach().bfloat16()
        slices = target_slices(tensor, rollout, worker, heads)
        kinds = [(slices, weight)]
        if is_quantised(heads.family, name):
            values, scales = quantise(weight)
            kinds = [(slices, values), (slices_of_scales(tensor, slices, rollout, heads.family), scales)]
        for parts, whole in kinds:
            for part in parts:
                found.setdefault(part.parameter, []).append((part.at, whole[part.block.slices]))
    return found


def _assembled(pieces: list[tuple[tuple[int, ...], torch.Tensor]]) -> torch.Tensor:
    ends = [tuple(c + s for c, s in zip(corner, values.shape, strict=True)) for corner, values in pieces]
    whole = torch.zeros(tuple(map(max, zip(*ends, strict=True))), dtype=pieces[0][1].dtype)
    for corner, values in pieces:
        assert values.dtype == whole.dtype
        whole[tuple(slice(low, low + size) for low, size in zip(corner, values.shape, strict=True))] = values
    return whole
