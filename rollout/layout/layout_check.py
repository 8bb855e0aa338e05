"""One format of a worker's layout for both sides, which are compared before the first sync.

The trainer derives it from its plan (``servers.planned_layout``), the worker from its model (``actual_layout``). An
entry is a parameter's shape without padding and, for vocabularies and experts, the global index of its first row.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .specs import Rollout

__all__ = ["RANK", "difference", "actual_layout", "entry", "named_layers", "prefix_of", "rank_entry", "unpadded_shape"]

RANK = "worker"  # the key of the entry that identifies the worker; no parameter has such a name


def entry(shape: Iterable[int], first: int | str = 0) -> str:
    """Format one entry, e.g. ``[100, 96] from 100``."""
    return f"{list(shape)} from {first}"


def rank_entry(tp_rank: int, rollout: Rollout) -> str:
    """Format a worker's rank, e.g. ``1 of 2 in tensor parallel, experts whole``."""
    return f"{tp_rank} of {rollout.tp} in tensor parallel, experts {'whole' if rollout.expert_parallel else 'cut'}"


def named_layers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return each layer of a model once, with its first name: tied embeddings come before the head.

    Where vLLM runs transformers' code, its runner of experts holds the gate and the shared experts of the block too;
    these have their shortest name. A drafter whose layers are at ``mtp`` in checkpoints (Qwen3-Next, Nemotron-H) has
    them at ``model``, like the model its own layers. Its names begin with ``mtp`` here.
    """
    names: dict[torch.nn.Module, str] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        first = names.setdefault(layer, name)
        if ".experts." in first and len(name) < len(first):
            names[layer] = name
    is_beside = not {"model.pre_fc_norm_hidden", "model.layers.0.enorm"}.isdisjoint(names.values())
    return [(re.sub(r"^model\b", "mtp", name) if is_beside else name, layer) for layer, name in names.items()]


def prefix_of(layer: str) -> str:
    """Return the prefix of a layer's tensors, without the module that some vLLM releases insert below experts."""
    return layer.replace(".routed_experts", "") + "." if layer else ""


def actual_layout(
    layers: Iterable[tuple[str, Any, Mapping[str, Any]]], rank: str, is_expected: Callable[[str, str, bool], bool]
) -> dict[str, str]:
    """Return the entry of each parameter of a worker's model, in the format of ``planned_layout``.

    Args:
        layers: ``(name, module, tensors by name)`` of each layer, the tensors as they were after construction.
        is_expected: whether plans have a tensor, by its full name, its own name, and whether it is a parameter.
    """
    found = {RANK: rank}
    for name, layer, tensors in layers:
        for own, tensor in tensors.items():
            full, shape = prefix_of(name) + own, unpadded_shape(layer, own, tensor)
            # The last worker's part of a small vocabulary may be padding alone.
            if all(shape) and is_expected(full, own, own in layer._parameters):
                found[full] = entry(shape, _first_row(layer, own))
                if hasattr(layer, "moe_config") and shape != list(tensor.shape):
                    # vLLM 0.32 pads for FlashInfer's TRT-LLM kernel, also between the gate and the up projection.
                    # No plan has padded experts, so this entry differs from every plan.
                    found[full] += f", padded to {list(tensor.shape)}"
    return found


def _first_row(layer: Any, own: str) -> int | str:
    if hasattr(layer, "shard_indices"):
        return layer.shard_indices.org_vocab_start_index
    if hasattr(layer, "moe_ep_rank"):  # SGLang places equally many experts on each worker, in linear order
        return layer.moe_ep_rank * layer.num_local_experts
    experts = getattr(layer, "_expert_map", None)
    if experts is None or not own.startswith(("w13_", "w2_")):
        return 0
    order = [expert for local, expert in sorted((at, expert) for expert, at in enumerate(experts.tolist()) if at >= 0)]
    first = order[0] if order else 0
    return first if order == list(range(first, first + len(order))) else f"experts {order}"


def difference(planned: Mapping[str, str], actual: Mapping[str, str]) -> str:
    """Describe the first difference between a planned and an actual layout, in the worker's order; empty if equal."""
    entries = {**actual, **planned}
    names = [name for name in entries if planned.get(name) != actual.get(name)]
    if not names:
        return ""
    return (
        f"the trainer's plan and the worker's model differ in {len(names)} of {len(entries)} entries, first "
        f"{names[0]}: planned is {planned.get(names[0], 'nothing')}, actual is {actual.get(names[0], 'nothing')}"
    )


def unpadded_shape(layer: Any, name: str, parameter: torch.Tensor) -> list[int]:
    """Return the shape of a worker's parameter without the padding of vLLM's vocabularies, sinks, gates and experts."""
    shape = list(parameter.shape)
    if hasattr(layer, "shard_indices") and shape[0] == layer.num_embeddings_per_partition:
        return [layer.shard_indices.num_org_elements, *shape[1:]]
    if name == "attn_sink":
        return [getattr(layer, "n_local_heads", shape[0])]
    if name == "weight" and hasattr(layer, "n_total_experts"):  # Inkling's gate
        return [layer.n_total_experts, *shape[1:]]
    moe = getattr(layer, "moe_config", None)
    if moe is None or not name.startswith(("w13_", "w2_")):
        return shape
    for size in ("hidden_dim", "intermediate_size_per_partition"):
        padded, true = getattr(moe, size), getattr(moe, f"{size}_unpadded")
        dim = next((d for d, rows in enumerate(shape) if d and rows in (padded, 2 * padded)), None)
        if true and true != padded and dim is not None:
            shape[dim] = shape[dim] // padded * true
    return shape
