"""Measurements of a side: bytes on the wire, memory of an update, and errors of its gradients."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.rivals.sides import Batch, Side, log_probs_and_entropies, loss_of
from tests.support.engine.memory import peak_of
from tests.support.engine.sharded import whole_tensor
from tests.support.models.tiny import reference_model

__all__ = ["gradient_error", "memory_bytes", "wire_bytes"]

# By torch's names of collectives: the argument whose bytes are meant, and how often each byte is received.
_COLLECTIVES = {
    "c10d::_allgather_base_": (0, 1),
    "c10d::_reduce_scatter_base_": (1, 1),
    "c10d::alltoall_base_": (1, 1),
    "c10d::allreduce_": (0, 2),
    "_c10d_functional::all_gather_into_tensor": (None, 1),  # its argument is one rank's part
    "_c10d_functional::reduce_scatter_tensor": (0, 1),
    "_c10d_functional::all_to_all_single": (0, 1),
    "_c10d_functional::all_reduce": (0, 2),
    "_c10d_functional::all_reduce_": (0, 2),
}


class _Wire(TorchDispatchMode):
    """Adds up what collectives of torch receive from other ranks, as in ``engine/planner/traffic.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and name in _COLLECTIVES:
            argument, times = _COLLECTIVES[name]
            ranks = _ranks_of(func, args)
            tensors = args[argument or 0]
            nbytes = sum(t.nbytes for t in (tensors if isinstance(tensors, (list, tuple)) else [tensors]))
            self.nbytes += times * nbytes * (ranks if argument is None else 1) * (ranks - 1) / ranks
        return func(*args, **(kwargs or {}))


def _ranks_of(func: Any, args: Sequence[Any]) -> int:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value).size()  # type: ignore[attr-defined]
        if argument.name == "group_name":
            return dist.distributed_c10d._resolve_process_group(value).size()
    raise AssertionError(f"{func} has no group")


def wire_bytes(update: Callable[[], object]) -> float:
    """Bytes that all ranks together receive in an update; collective."""
    with _Wire() as wire:
        update()
    total = torch.tensor(wire.nbytes, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def memory_bytes(update: Callable[[], object]) -> int:
    """Most bytes that an update allocates at once, on the rank where it is most; collective.

    Weights and the optimizer's state, which are there before, are not counted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("update"):
        update()
    most = torch.tensor(peak_of(profiler, "update")[0])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def gradient_error(side: Side, folder: Path, batch: Batch) -> float:
    """The largest relative error of a gradient against the plain model's in one process; collective.

    Args:
        folder: of the checkpoint that the side has loaded and not yet changed.
        batch: of this rank; the others' are gathered.
    """
    everyones: list[Batch | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, batch)
    wanted = {}
    if dist.get_rank() == 0:
        model = reference_model(folder)
        for each in (b for b in everyones if b is not None):
            for one in _one_by_one(each):
                logits_TV = model(input_ids=one.ids[0][None], use_cache=False).logits[0, :-1]
                loss = loss_of(one, *log_probs_and_entropies(logits_TV, one.ids[0][1:]))
                (loss / dist.get_world_size()).backward()
        wanted = {name: param.grad for name, param in model.named_parameters()}
    errors = [0.0]
    for name, gradient in side.gradients(batch):
        whole = whole_tensor(gradient)
        if wanted:
            errors.append(((whole - wanted[name]).norm() / wanted[name].norm()).item())
    assert not wanted or len(errors) == len(wanted) + 1
    largest = torch.tensor(errors).max()  # NaN if one is
    dist.broadcast(largest, 0)
    return largest.item()


def _one_by_one(batch: Batch) -> Iterator[Batch]:
    for i, ids in enumerate(batch.ids):
        yield Batch([ids], None if batch.advantages is None else [batch.advantages[i]], batch.tokens)
