"""What a vLLM worker keeps of a model, said in one form by both sides, so that they can be compared before a sync.

The trainer's side follows from its plan (``layout``), the worker's from its own model
(``WeightSyncExtension.epfsdp2_check_layout``). An entry is a parameter's shape without vLLM's padding, and the first of
its rows where the worker knows that: which rows of the vocabulary, or which experts.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .vllm_layout import Heads, Need, Rollout, Tensor, is_numbered, needs

__all__ = [
    "RANK",
    "difference",
    "digest",
    "entry",
    "held_layout",
    "layout",
    "layouts",
    "prefix_of",
    "rank_entry",
    "unpadded_shape",
]

# The entry that says which worker it is; no parameter has such a name.
RANK = "worker"


def entry(shape: Iterable[int], first: int | str = 0) -> str:
    """``[100, 96] from 100``."""
    return f"{list(shape)} from {first}"


def rank_entry(tp_rank: int, rollout: Rollout) -> str:
    """``1 of 2 in tensor parallel, experts whole``."""
    return f"{tp_rank} of {rollout.tp} in tensor parallel, experts {'whole' if rollout.expert_parallel else 'cut'}"


def prefix_of(layer: str) -> str:
    """What the names of a layer's tensors begin with, given the layer's name in vLLM's model.

    Some versions of vLLM have a module of their own between an experts layer and its weights; names do not.
    """
    return layer.replace(".routed_experts", "") + "." if layer else ""


def layout(tensors: Iterable[Tensor], rollout: Rollout, worker: int, heads: Heads) -> dict[str, str]:
    """Entry by vLLM's name of everything that a worker keeps, as the trainer plans it.

    Raises:
        ValueError: if vLLM could not cut a tensor so.
    """
    placed: dict[str, list[Need]] = {}
    first: dict[str, int] = {}
    for tensor in tensors:
        for need in needs(tensor, rollout, worker, heads):
            placed.setdefault(need.parameter, []).append(need)
            if is_numbered(tensor.name):
                first[need.parameter] = need.box.low[0]
    found = {RANK: rank_entry(worker % rollout.tp, rollout)}
    for parameter, parts in placed.items():
        ends = zip(*(need.end for need in parts), strict=True)
        found[parameter] = entry((max(end) for end in ends), first.get(parameter, 0))
    return found


def layouts(tensors: Sequence[Tensor], rollout: Rollout, heads: Heads) -> list[dict[str, str]]:
    """The ``layout`` of each worker of a replica."""
    return [layout(tensors, rollout, worker, heads) for worker in range(rollout.workers)]


def held_layout(
    layers: Iterable[tuple[str, Any, Mapping[str, Any]]],
    rank: str,
    is_needed: Callable[[str, str, bool], bool],
) -> dict[str, str]:
    """The same, of what a vLLM model really has.

    Args:
        layers: name, module, and its tensors by name as they were when the model was built.
        rank: ``rank_entry`` of this worker.
        is_needed: tells by its full name, its own name and whether it is a parameter if a tensor is to be planned for.
    """
    found = {RANK: rank}
    for name, layer, tensors in layers:
        prefix = prefix_of(name)
        for own, tensor in tensors.items():
            shape = unpadded_shape(layer, own, tensor)
            # All that the last worker has of a small vocabulary may be padding.
            if all(shape) and is_needed(prefix + own, own, own in layer._parameters):
                found[prefix + own] = entry(shape, _first_row(layer, own))
    return found


def _first_row(layer: Any, own: str) -> int | str:
    if hasattr(layer, "shard_indices"):
        return layer.shard_indices.org_vocab_start_index
    experts = getattr(layer, "_expert_map", None)
    if experts is None or not own.startswith(("w13_", "w2_")):
        return 0
    places = {place: expert for expert, place in enumerate(experts.tolist()) if place >= 0}
    order = [places[place] for place in sorted(places)]
    in_order = order == list(range(order[0], order[0] + len(order))) if order else True
    return (order[0] if order else 0) if in_order else f"experts {order}"


def digest(found: Mapping[str, str]) -> str:
    """Equal for equal layouts."""
    return hashlib.blake2b(json.dumps(sorted(found.items())).encode(), digest_size=16).hexdigest()


def difference(planned: Mapping[str, str], held: Mapping[str, str]) -> str:
    """How a plan and a worker differ, by the first entry, in the worker's order; empty if they don't."""
    names = [name for name in {**held, **planned} if planned.get(name) != held.get(name)]
    if not names:
        return ""
    name = names[0]
    return (
        f"the trainer's plan (digest {digest(planned)}) and vLLM's model (digest {digest(held)}) differ in "
        f"{len(names)} of {len({**held, **planned})} entries, first {name}: {planned.get(name, 'nothing')} is planned, "
        f"{held.get(name, 'nothing')} is there"
    )


def unpadded_shape(layer: Any, name: str, parameter: torch.Tensor) -> list[int]:
    """What a checkpoint holds for a parameter of this rank; vLLM pads vocabularies and some experts."""
    shape = list(parameter.shape)
    if hasattr(layer, "shard_indices") and shape[0] == layer.num_embeddings_per_partition:
        return [layer.shard_indices.num_org_elements, *shape[1:]]
    moe = getattr(layer, "moe_config", None)
    if moe is None or not name.startswith(("w13_", "w2_")):
        return shape
    for padded, true in (
        (moe.hidden_dim, moe.hidden_dim_unpadded),
        (moe.intermediate_size_per_partition, moe.intermediate_size_per_partition_unpadded),
    ):
        dim = next((d for d, size in enumerate(shape) if d and size in (padded, 2 * padded)), None)
        if true and true != padded and dim is not None:
            shape[dim] = shape[dim] // padded * true
    return shape
