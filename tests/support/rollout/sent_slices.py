"""What a sync sends to a worker, beside the slices of whole weights."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from epfsdp2.engine.lora.merge import AdapterUse
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.rollout.layout.slice_names import slice_name
from epfsdp2.rollout.layout.specs import Heads, Rollout, TargetSlice, TensorSpec
from epfsdp2.rollout.servers import is_quantised, server_of, slices_of_scales, target_slices
from epfsdp2.rollout.sync import RolloutSync, RolloutWeights, SyncSettings
from epfsdp2.rollout.vllm.server import EXTENSION
from tests.support.engine.sharded import sharded_model
from tests.support.models.quantised import BLOCK, COMPRESSED
from tests.support.models.tiny import reference_model

__all__ = [
    "Sent",
    "bits",
    "check_slices_of_the_whole",
    "collected",
    "config_for",
    "joined",
    "stored_parameters",
    "weights_for",
]

Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Sent(NamedTuple):
    """What a sync sent to the worker of this rank."""

    sync: RolloutSync
    weights: RolloutWeights
    parameters: dict[str, torch.Tensor]


def config_for(rollout: Rollout) -> dict[str, Any]:
    """Return verl's config of a vLLM with these sizes that loads this package's slices."""
    held: dict[str, Any] = {"worker_extension_cls": EXTENSION}
    if rollout.channels:
        held["hf_overrides"] = {"quantization_config": COMPRESSED[rollout.channels]}
    assert rollout.block in (0, BLOCK)
    return {
        "name": "vllm",
        "tensor_model_parallel_size": rollout.tp,
        "data_parallel_size": rollout.dp,
        "expert_parallel_size": rollout.workers if rollout.expert_parallel else 1,
        "quantization": "fp8" if rollout.block else None,
        "engine_kwargs": {"vllm": held},
    }


def weights_for(sync: RolloutSync, rollout: Rollout, worker: int, adapters: AdapterUse = "merged") -> RolloutWeights:
    """Return what a sync sends to a worker of such a rollout."""
    return sync.weights(adapters).for_rollout(config_for(rollout), worker)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def collected(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return copies of the parameters that a sync sends, put together where one comes in parts."""
    parts: dict[str, list[tuple[int, int, int, torch.Tensor]]] = {}
    for name, values in tensors:  # which are the sender's until the next ones are asked for
        parameter, *numbers = name.rsplit("/", 3)
        first, step, axis = map(int, numbers)
        assert name == slice_name(parameter.removeprefix("__epfsdp2__/"), first, step, axis)
        parts.setdefault(parameter.removeprefix("__epfsdp2__/"), []).append((first, step, axis, values.clone()))
    return {parameter: joined(parameter, sent) for parameter, sent in parts.items()}


def joined(parameter: str, parts: list[tuple[int, int, int, torch.Tensor]]) -> torch.Tensor:
    """Return a parameter of which there are all parts: first index, step, axis, and values."""
    ((step, axis, dtype),) = {(step, axis, values.dtype) for _, step, axis, values in parts}
    assert sorted(first for first, *_ in parts) == list(range(step)), parameter
    if step == 1:
        return parts[0][3]
    shape = list(parts[0][3].shape)
    shape[axis] = sum(values.shape[axis] for *_, values in parts)
    found = torch.empty(shape, dtype=dtype)
    for first, _, _, values in parts:
        found[(*[slice(None)] * axis, slice(first, None, step))] = values
    return found


def stored_parameters(
    slices: Iterable[tuple[TargetSlice, torch.Tensor]], head_dim: int = 1
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the parameters that slices of whole tensors fill, and which of their elements.

    Args:
        slices: with the whole tensor of each.
        head_dim: rows of a head, for slices in ``halves``.
    """
    parts: dict[str, list[tuple[TargetSlice, torch.Tensor]]] = {}
    for part, whole in slices:
        parts.setdefault(part.parameter, []).append((part, _stored(whole[part.block.slices], part, head_dim)))
    found = {}
    for name, placed in parts.items():
        shape = tuple(map(max, zip(*(part.end for part, _ in placed), strict=True)))
        dtype = max((values.dtype for _, values in placed), key=lambda dtype: dtype.itemsize)
        whole, is_filled = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for part, values in placed:
            into = tuple(map(slice, part.at, part.end))
            whole[into] = values.reshape(values.shape[values.dim() - len(part.at) :])
            is_filled[into] = True
        found[name] = whole, is_filled
    return found


def _stored(values: torch.Tensor, part: TargetSlice, head_dim: int) -> torch.Tensor:
    if part.form == "transposed":
        return values.mT
    if part.form == "zeros":
        return torch.zeros_like(values)
    if part.form == "decay":
        return -torch.exp(values.float())
    if part.form == "halves":
        return torch.cat([torch.cat([head[::2], head[1::2]]) for head in values.split(head_dim)])
    return values


def check_slices_of_the_whole(folder: Path, mesh: tuple[int, int], rollout: Rollout, quantise: Quantise) -> Sent:
    """Compare, bit for bit, what a sync sends with the slices of whole weights in bfloat16 that ``quantise`` rounds.

    Args:
        mesh: ``ep`` and ``etp``.
        quantise: returns the values and the scales of a weight.
    """
    model, meshes = sharded_model(folder, dist.get_world_size(), mesh[0], etp=mesh[1])
    dtypes = dict.fromkeys((name for name, _ in model.named_parameters()), torch.bfloat16)
    sync = RolloutSync(model, meshes, layer_names(model), dtypes, SyncSettings("sliced", 1 << 23))
    worker = dist.get_rank() % rollout.workers
    weights = weights_for(sync, rollout, worker)
    assert weights.is_quantised_here
    sent = collected(weights.tensors())
    config = config_for(rollout)
    kept = server_of(config).rollout_of(config)
    expected = stored_parameters(_quantised_slices(folder, kept, worker, quantise))
    assert sent.keys() == expected.keys()
    for parameter, (wanted, is_filled) in expected.items():
        found = sent[parameter]
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), parameter
        assert torch.equal(bits(found[is_filled]), bits(wanted[is_filled])), (parameter, mesh, rollout)
        layout = weights.planned_layouts()[worker][parameter]
        assert layout.startswith(str(list(wanted.shape))), (parameter, layout)
    return Sent(sync, weights, sent)


def _quantised_slices(
    folder: Path, rollout: Rollout, worker: int, quantise: Quantise
) -> Iterable[tuple[TargetSlice, torch.Tensor]]:
    model = reference_model(folder)
    heads = Heads.of(model.config)
    for name, weight in model.named_parameters():
        tensor, weight = TensorSpec(name, tuple(weight.shape), 1), weight.detach().bfloat16()
        slices = target_slices(tensor, rollout, worker, heads)
        if not is_quantised(heads.family, name):
            yield from ((part, weight) for part in slices)
            continue
        values, scales = quantise(weight)
        yield from ((part, values) for part in slices)
        yield from ((part, scales) for part in slices_of_scales(tensor, slices, rollout, heads.family))
