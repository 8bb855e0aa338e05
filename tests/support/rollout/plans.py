"""Plans that hypothesis draws, and the exchange of a plan among all its ranks in one process."""

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from epfsdp2.engine.topology.index_ranges import ShardStep, shard_ranges
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.plan.routes import Member, route_of
from epfsdp2.rollout.plan.transfer_plan import Targets, TransferPlan

__all__ = ["Emulated", "problems", "shard_of"]


@st.composite
def problems(draw):
    """Draw a small model of two layers, a trainer, a rollout, its targets, and a limit."""
    replicas, ep_fsdp, ep = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4]))
    etp = draw(st.sampled_from([1, 1, 2]))
    topology = Topology(replicas * ep_fsdp * ep * etp, ep, ep_fsdp, replicas, etp)
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    rollout = Rollout(tp, dp, draw(st.booleans()))
    kv = draw(st.sampled_from([1, 2, 4]))
    heads = Heads(kv * draw(st.sampled_from([1, 2])) * (4 // kv), kv, draw(st.sampled_from([3, 4])))
    hidden, inner = draw(st.integers(2, 9)), ep_fsdp * 8 * draw(st.integers(1, 2))
    experts, vocabulary = ep * draw(st.integers(1, 3)), draw(st.integers(3, 90))
    shard_dim = draw(st.sampled_from([0, 1] if experts // ep % ep_fsdp == 0 else [1]))
    dense, over_ep = (ShardStep(0, "fsdp", topology.fsdp),), ShardStep(0, "ep", ep)
    stacks = (over_ep, ShardStep(shard_dim, "ep_fsdp", ep_fsdp))
    down = stacks if shard_dim == 0 or hidden % ep_fsdp == 0 else (over_ep, ShardStep(2, "ep_fsdp", ep_fsdp))
    if etp > 1:
        whole = shard_dim == 0 or hidden % ep_fsdp
        over_hidden = [ShardStep(0 if whole else dim, "ep_fsdp", ep_fsdp) for dim in (2, 1)]
        stacks = (over_ep, ShardStep(1, "etp", etp, split_factor=2), over_hidden[0])
        down = (over_ep, ShardStep(2, "etp", etp), over_hidden[1])
    inside = {
        "self_attn.q_proj.weight": ((heads.queries * heads.dim, hidden), dense),
        "self_attn.k_proj.weight": ((heads.keys * heads.dim, hidden), dense),
        "self_attn.o_proj.weight": ((hidden, heads.queries * heads.dim), dense),
        "mlp.gate.weight": ((experts, hidden), dense),
        "mlp.gate.e_score_correction_bias": ((experts,), ()),
        "mlp.experts.gate_up_proj": ((experts, 2 * inner, hidden), stacks),
        "mlp.experts.down_proj": ((experts, hidden, inner), down),
        "mlp.shared_expert.up_proj.weight": ((inner, hidden), dense),
        "input_layernorm.weight": ((hidden,), dense),
    }
    tensors = [TensorSpec("model.embed_tokens.weight", (vocabulary, hidden), 2, dense)]
    tensors += [
        TensorSpec(f"model.layers.{i}.{n}", shape, 2, cuts) for i in (0, 1) for n, (shape, cuts) in inside.items()
    ]
    tensors += [
        TensorSpec("model.norm.weight", (hidden,), 2, dense),
        TensorSpec("lm_head.weight", (vocabulary, hidden), 2, dense),
    ]
    if draw(st.booleans()):
        targets = Targets.separate([*range(rollout.workers)] * draw(st.integers(1, 2)), topology)
    else:
        targets = Targets.colocated(topology, rollout.workers)
    return tensors, topology, rollout, heads, targets, draw(st.integers(6000, 60000))


def shard_of(value: torch.Tensor, tensor: TensorSpec, plan: TransferPlan, rank: int) -> torch.Tensor:
    """Return the shard of a rank of a trainer replica."""
    ranges = shard_ranges(tensor.shape, tensor.cuts, plan.topology.coordinate(rank))
    if len(ranges) == 1:
        return value[ranges[0].slices]
    dim = next(d for d, low in enumerate(ranges[0].low) if low != ranges[1].low[d])
    return torch.cat([value[held.slices] for held in ranges], dim)


class Emulated:
    """Runs every round of a plan.

    Args:
        whole: the values of all tensors by name, all of one dtype.

    Attributes:
        moved: the bytes that each rank sent and received, round by round.
        parameters: by worker and name, what it got.
    """

    def __init__(self, plan: TransferPlan, whole: Mapping[str, torch.Tensor]):
        self.plan, self._whole = plan, whole
        self._route = cache(lambda round_, member: route_of(round_, member, plan))
        self.moved: list[list[tuple[int, int]]] = []
        self.parameters: list[dict[str, torch.Tensor]] = [{} for _ in plan.targets.kinds]
        ranks, world = plan.topology.fsdp, plan.topology.world
        if plan.targets.are_separate:
            members = [Member.of(plan, rank) for rank in range(world + len(plan.targets.kinds))]
            self._run(members, -world)
        else:
            for replica in range(world // ranks):
                self._run([Member.of(plan, replica * ranks + rank) for rank in range(ranks)], replica * ranks)

    def _run(self, members: list[Member], first: int) -> None:
        for prefix, round_ in self.plan.rounds:
            messages = [self._messages(round_, prefix, member) for member in members]
            moved = []
            for rank, member in enumerate(members):
                incoming = [sent[rank] for sent in messages]
                moved.append((sum(map(len, messages[rank])), sum(map(len, incoming))))
                if member.kind is not None:
                    self._receive(round_, prefix, member, incoming, first + rank)
            self.moved.append(moved)

    def _messages(self, round_, prefix, member: Member) -> list[np.ndarray]:
        if member.source is None:
            return [np.zeros(0, dtype=np.uint8)] * len(member.targets)
        packing = self._route(round_, member)
        flat = np.zeros(packing.flat_bytes, dtype=np.uint8)
        for copy in packing.copies:
            spec = round_.specs[copy.tensor]
            full = TensorSpec(prefix + spec.name, spec.shape, spec.itemsize, spec.cuts)
            held = shard_of(self._whole[full.name], full, self.plan, member.source)
            held = held if copy.inside is None else held[copy.inside]
            held = held.contiguous().view(-1).view(torch.uint8).numpy()
            flat[copy.start : copy.start + len(held)] = held
        sent = flat[: len(flat) // round_.unit * round_.unit].reshape(-1, round_.unit)[packing.sent].reshape(-1)
        if self.plan.targets.are_gathered:
            return [sent] * len(member.targets)
        return np.split(sent, np.cumsum(packing.sent_sizes)[:-1])

    def _receive(self, round_, prefix, member: Member, incoming: list[np.ndarray], worker: int) -> None:
        found = self._route(round_, member)
        assert [len(message) for message in incoming] == found.received_sizes
        received = np.concatenate(incoming)
        rows = received.reshape(-1, round_.unit)[found.received].reshape(-1)
        words = received.reshape(-1, round_.word)[found.received_words].reshape(-1)
        out, dtype = torch.from_numpy(np.concatenate([rows, words])), next(iter(self._whole.values())).dtype
        assert len(out) == found.nbytes
        for arrival in found.arrivals:
            parameter, share = arrival.parameter, arrival.share
            start = arrival.placed[0][1]
            values = out[start : start + torch.Size(arrival.shape).numel() * dtype.itemsize].view(dtype)
            # Names are those of the first layer with this template.
            made_with = next(layer for layer, each in self.plan.rounds if each is round_)
            name = prefix + parameter.name.removeprefix(made_with)
            into = self.parameters[worker].setdefault(name, torch.full(parameter.shape, torch.nan, dtype=dtype))
            into = into.movedim(arrival.axis, 0)[share.part :: share.parts].movedim(0, arrival.axis)
            assert into.isnan().all(), f"a part of {name} came twice"
            into.copy_(values.view(arrival.shape))
