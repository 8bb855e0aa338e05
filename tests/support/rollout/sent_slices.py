"""A sync's tensors for a worker, and their comparison with the slices of whole weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from epfsdp2.engine.lora.merge import AdapterUse
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.rollout.layout.slice_names import slice_name
from epfsdp2.rollout.layout.specs import Heads, Rollout
from epfsdp2.rollout.servers import server_of
from epfsdp2.rollout.sync import RolloutSync, RolloutWeights, SyncSettings
from epfsdp2.rollout.vllm.server import EXTENSION
from tests.support.engine.sharded import sharded_model
from tests.support.models.quantised import BLOCK, COMPRESSED
from tests.support.models.tiny import reference_model
from tests.support.rollout.units import Quantise, bits, check_stored, stored_parameters, worker_slices

__all__ = ["Sent", "bits", "check_slices_of_the_whole", "collected", "config_for", "stored_parameters", "weights_for"]


class Sent(NamedTuple):
    """A sync to the worker of this rank."""

    sync: RolloutSync
    weights: RolloutWeights
    parameters: dict[str, torch.Tensor]


def config_for(rollout: Rollout) -> dict[str, Any]:
    """Return verl's config of such a vLLM rollout, which loads slices."""
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
    """Return the weights of a sync for a worker of such a rollout."""
    return sync.weights(adapters).for_rollout(config_for(rollout), worker)


def collected(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return copies of the parameters that a sync sends, joined from their parts."""
    parts: dict[str, list[tuple[int, int, int, torch.Tensor]]] = {}
    for name, values in tensors:  # valid until the next request
        parameter, *numbers = name.removeprefix("__epfsdp2__/").rsplit("/", 3)
        first, step, axis = map(int, numbers)
        assert name == slice_name(parameter, first, step, axis)
        parts.setdefault(parameter, []).append((first, step, axis, values.clone()))
    return {parameter: _joined(parameter, sent) for parameter, sent in parts.items()}


def _joined(parameter: str, parts: list[tuple[int, int, int, torch.Tensor]]) -> torch.Tensor:
    """Join all parts of a parameter: first index, step, axis, and values."""
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


def check_slices_of_the_whole(folder: Path, mesh: tuple[int, int], rollout: Rollout, quantise: Quantise) -> Sent:
    """Compare a sync, bit for bit, with the slices of whole weights in bfloat16 that ``quantise`` rounds.

    Args:
        mesh: ``ep`` and ``etp``.
    """
    model, meshes = sharded_model(folder, dist.get_world_size(), mesh[0], etp=mesh[1])
    dtypes = dict.fromkeys((name for name, _ in model.named_parameters()), torch.bfloat16)
    sync = RolloutSync(model, meshes, layer_names(model), dtypes, SyncSettings("sliced", 1 << 23))
    worker = dist.get_rank() % rollout.workers
    weights = weights_for(sync, rollout, worker)
    assert weights.is_quantised_here
    sent = collected(weights.tensors())
    config, reference = config_for(rollout), reference_model(folder)
    whole = ((name, weight.detach().bfloat16()) for name, weight in reference.named_parameters())
    kept, heads = server_of(config).rollout_of(config), Heads.of(reference.config)
    expected = stored_parameters(worker_slices(whole, kept, worker, heads, quantise))
    check_stored(sent, expected, (mesh, rollout))
    layout = weights.planned_layouts()[worker]
    for parameter, (wanted, _) in expected.items():
        assert layout[parameter].startswith(str(list(wanted.shape))), (parameter, layout[parameter])
    return Sent(sync, weights, sent)
