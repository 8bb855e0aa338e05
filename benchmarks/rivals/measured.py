"""Measurements of two sides: seconds in turns, memory, bytes on the wire, and errors of gradients."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measure import in_turns, median_ratio, memory_bytes, seconds_on_ranks
from benchmarks.rivals.sides import Batch, Side, log_probs_and_entropies, loss_of
from benchmarks.tables import judged
from tests.support.engine.sharded import whole_gradients
from tests.support.models.tiny import reference_model, relative_error

__all__ = ["cells", "gradient_error", "largest_error", "measured", "wire_bytes"]

# By torch's names of collectives: the argument whose bytes are counted, and how often each byte is received.
_COLLECTIVES = {
    "c10d::_allgather_base_": (0, 1),
    "c10d::_reduce_scatter_base_": (1, 1),
    "c10d::alltoall_base_": (1, 1),
    "c10d::allreduce_": (0, 2),
    "_c10d_functional::all_gather_into_tensor": (None, 1),  # the result: its argument is one rank's part
    "_c10d_functional::reduce_scatter_tensor": (0, 1),
    "_c10d_functional::all_to_all_single": (0, 1),
    "_c10d_functional::all_reduce": (0, 2),
    "_c10d_functional::all_reduce_": (0, 2),
}


class _Wire(TorchDispatchMode):
    """Adds up the bytes that collectives of torch receive from other ranks, as in ``engine/planner/traffic.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, schema = func(*args, **(kwargs or {})), func._schema
        if schema.name in _COLLECTIVES:
            argument, times = _COLLECTIVES[schema.name]
            named = {each.name: value for each, value in zip(schema.arguments, args, strict=False)}
            if "group_name" in named:
                group = dist.distributed_c10d._resolve_process_group(named["group_name"])
            else:
                group = dist.ProcessGroup.unbox(named["process_group"])  # type: ignore[attr-defined]
            nbytes = sum(tensor.nbytes for tensor in tree_leaves(result if argument is None else args[argument]))
            self.nbytes += times * nbytes * (group.size() - 1) / group.size()
        return result


def wire_bytes(update: Callable[[], object]) -> float:
    """Return the bytes that all ranks together receive in an update; collective."""
    with _Wire() as wire:
        update()
    total = torch.tensor(wire.nbytes, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def measured(updates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, Any]]:
    """Return seconds of each turn, bytes of memory and bytes on the wire, by side; collective."""
    return {
        "seconds": in_turns({name: partial(seconds_on_ranks, update) for name, update in updates.items()}, repeats),
        "memory": {name: memory_bytes(update) for name, update in updates.items()},
        "wire": {name: wire_bytes(update) for name, update in updates.items()},
    }


def cells(found: dict[str, Any], side: str, rival: str, least: float, largest: float) -> dict[str, str]:
    """Return the last cells of a side's row.

    Args:
        found: the result of ``measured``, and each side's ``error``.
        least: bound of the speedup over the rival.
        largest: bound of the error.
    """
    speedup, error = median_ratio(found["seconds"][rival], found["seconds"][side]), found["error"][side]
    return {
        "side": side,
        "seconds": f"{median(found['seconds'][side]):.3f}",
        "of the rival's": f"{speedup:.2f} x",
        "peak MB": f"{found['memory'][side] / 1e6:.0f}",
        "wire MB": f"{found['wire'][side] / 1e6:.1f}",
        "gradient error": f"{error:.1e}",
        **judged(speedup >= least and error <= largest if side != rival else None),
    }


def largest_error(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """Return the largest relative error of a gradient; NaN if one is."""
    assert found.keys() == wanted.keys()
    return torch.tensor([relative_error(found[name].float(), want) for name, want in wanted.items()]).max().item()


def gradient_error(side: Side, folder: Path, batch: Batch) -> float:
    """Return the first rank's largest error of a gradient against the plain model's, and others' 0; collective.

    Args:
        folder: of the checkpoint that the side has loaded and not yet changed.
        batch: of this rank; the others' are gathered.
    """
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, batch)
    side.loss(batch).backward()
    found = whole_gradients(side.model)
    side.model.zero_grad()
    if dist.get_rank() > 0:
        return 0.0
    model = reference_model(folder)
    for each in everyones:
        for i, ids in enumerate(each.ids):
            one = Batch([ids], each.advantages and each.advantages[i : i + 1], each.tokens)
            logits_TV = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            (loss_of(one, *log_probs_and_entropies(logits_TV, ids[1:])) / len(everyones)).backward()
    return largest_error(found, {name: param.grad for name, param in model.named_parameters()})
