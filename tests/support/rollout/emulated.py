"""An exchange among all ranks of a plan in one process: messages are cut and joined here instead of by a collective."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from epfsdp2.engine.topology.index_ranges import shard_ranges
from epfsdp2.rollout.layout.specs import TargetSlice, TensorSpec
from epfsdp2.rollout.plan.routes import Member, pack_positions, unpack_positions
from epfsdp2.rollout.plan.transfer_plan import TransferPlan

__all__ = ["Emulated", "expected_parameters", "shard_of"]


def shard_of(value: torch.Tensor, tensor: TensorSpec, plan: TransferPlan, rank: int) -> torch.Tensor:
    """Return what a rank of a trainer replica holds of a tensor."""
    ranges = shard_ranges(tensor.shape, tensor.cuts, plan.topology.coordinate(rank))
    if len(ranges) == 1:
        return value[ranges[0].slices]
    dim = next(d for d, low in enumerate(ranges[0].low) if low != ranges[1].low[d])
    return torch.cat([value[held.slices] for held in ranges], dim)


def expected_parameters(
    tensors: Sequence[TensorSpec], slices_of: Callable[[TensorSpec], Sequence[TargetSlice]], whole: Mapping
) -> dict[str, torch.Tensor]:
    """Return the parameters of a worker, made of whole tensors; what no tensor fills is NaN, or 0 where there is none.

    No slice has a form.
    """
    parts: dict[str, list[tuple[TargetSlice, torch.Tensor]]] = {}
    for tensor in tensors:
        for part in slices_of(tensor):
            parts.setdefault(part.parameter, []).append((part, whole[tensor.name][part.block.slices]))
    found = {}
    for name, placed in parts.items():
        shape = tuple(map(max, zip(*(part.end for part, _ in placed), strict=True)))
        dtype = placed[0][1].dtype
        nothing = torch.nan if dtype.is_floating_point and dtype.itemsize > 1 else 0
        found[name] = torch.full(shape, nothing, dtype=torch.float32).to(dtype)
        for part, values in placed:
            found[name][tuple(map(slice, part.at, part.end))] = values
    return found


class Emulated:
    """Runs every round of a plan.

    Args:
        whole: the values of all tensors by name, all of one dtype.
        separate: whether the workers are in processes of their own.

    Attributes:
        moved: the bytes that each rank sent and received, round by round.
        parameters: by worker and name, what it got.
    """

    def __init__(self, plan: TransferPlan, whole: Mapping[str, torch.Tensor], separate: bool):
        self.plan, self._whole = plan, whole
        self.moved: list[list[tuple[int, int]]] = []
        self.parameters: list[dict[str, torch.Tensor]] = [{} for _ in plan.targets.kinds]
        ranks, world = plan.topology.fsdp, plan.topology.world
        if separate:
            members = [Member.separate(plan, rank) for rank in range(world + len(plan.targets.kinds))]
            self._run(members, -world)
        else:
            for replica in range(world // ranks):
                self._run([Member.colocated(plan, replica, rank) for rank in range(ranks)], replica * ranks)

    def _run(self, members: list[Member], first: int) -> None:
        for prefix, template, number in self.plan.rounds:
            round_ = self.plan.templates[template].rounds[number]
            messages = [self._messages(round_, prefix, template, member) for member in members]
            moved = []
            for rank, member in enumerate(members):
                incoming = [sent[rank] for sent in messages]
                moved.append((sum(map(len, messages[rank])), sum(map(len, incoming))))
                if member.kind is not None:
                    self._receive(round_, prefix, template, member, incoming, first + rank)
            self.moved.append(moved)

    def _messages(self, round_, prefix, template, member: Member) -> list[np.ndarray]:
        if member.source is None:
            return [np.zeros(0, dtype=np.uint8)] * len(member.targets)
        packing, specs = pack_positions(round_, member), self.plan.templates[template].tensors
        flat = np.zeros(max(packing.nbytes, round_.unit), dtype=np.uint8)
        for i, inside, start in packing.values:
            full = TensorSpec(prefix + specs[i].name, specs[i].shape, specs[i].itemsize, specs[i].cuts)
            held = shard_of(self._whole[full.name], full, self.plan, member.source)
            held = (held if inside is None else held[inside]).contiguous().view(-1).view(torch.uint8).numpy()
            flat[start : start + len(held)] = held
        sent = flat[: len(flat) // round_.unit * round_.unit].reshape(-1, round_.unit)[packing.rows].reshape(-1)
        return np.split(sent, np.cumsum(packing.sizes)[:-1])

    def _receive(self, round_, prefix, template, member: Member, incoming: list[np.ndarray], worker: int) -> None:
        found = unpack_positions(round_, member, self.plan.topology.fsdp)
        assert [len(message) for message in incoming] == list(found.sizes)
        rows = np.concatenate(incoming).reshape(-1, round_.unit)[found.rows]
        out, dtype = torch.from_numpy(rows.reshape(-1).copy()), next(iter(self._whole.values())).dtype
        for arrival in found.arrivals:
            parameter = arrival.bundle.by_kind[member.kind][arrival.number]
            if arrival.elements:
                values = out[found.short :].view(dtype)[torch.from_numpy(arrival.elements[0])]
            else:
                count = torch.Size(arrival.shape).numel()
                values = out[arrival.start : arrival.start + count * dtype.itemsize].view(dtype)
            # Names are those of the first layer with this template.
            made_with = next(layer for layer, index in self.plan.layers if index == template)
            name = prefix + parameter.name.removeprefix(made_with)
            into = self.parameters[worker].setdefault(name, torch.full(parameter.shape, torch.nan, dtype=dtype))
            assert into[arrival.part :: arrival.parts].isnan().all(), f"rows of {name} came twice"
            into[arrival.part :: arrival.parts] = values.view(arrival.shape)
