"""Relayed plans: the same boxes for everybody, over the network once per node, passed on in the round they came in."""

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from epfsdp2.rollout.layout.transfer_plan import Targets, make_plan
from epfsdp2.rollout.layout.vllm_layout import needs
from epfsdp2.rollout.remote.relay import relayed
from tests.rollout.test_plan import _problems


@st.composite
def _clusters(draw):
    """A plan whose targets are numbered after the trainer's ranks, and nodes of all."""
    tensors, topology, rollout, heads, _, stream, limit = draw(_problems())
    trainers, replicas = topology.world, draw(st.integers(1, 3))

    def needs_of(tensor, rank):
        return [] if rank < trainers else needs(tensor, rollout, (rank - trainers) % rollout.workers, heads, stream)

    world = trainers + replicas * rollout.workers
    targets = Targets(world, colocated=False)
    # A worker that passes a row on sends it as often as it has neighbours.
    plan = make_plan(tensors, ["model.layers.0", "model.layers.1"], topology, targets, needs_of, 12 * limit)
    return plan, trainers, tuple(draw(st.sampled_from("abc")) for _ in range(world))


@settings(max_examples=60, deadline=None)
@given(_clusters())
def test_a_box_crosses_to_a_node_once_and_everybody_gets_the_same(cluster):
    plan, trainers, nodes = cluster
    relays = relayed(plan, nodes)
    for (name, before), (_, after) in zip(plan.tensors(), relays.tensors(), strict=True):
        assert Counter((t.box, t.target) for t in before.transfers) == Counter(
            (t.box, t.target) for t in after.transfers
        ), name
        crossings = Counter((t.box, nodes[t.target]) for t in after.transfers if nodes[t.source] != nodes[t.target])
        assert all(times == 1 for times in crossings.values()), name
        for t in after.transfers:
            assert t.source < trainers or nodes[t.source] == nodes[t.target]
    assert sum(relays.received.values()) == sum(plan.received.values())

    for pieces in relays.rounds:
        load, come = Counter(), defaultdict(set)
        for piece in pieces:
            transfers = list(relays.transfers(piece))
            for t in transfers:
                load["from", t.source] += 2 * t.box.numel
                load["to", t.target] += 2 * t.box.numel
                if t.source < trainers:
                    come[t.target].add((piece, t.box))
            assert all((piece, t.box) in come[t.source] for t in transfers if t.source >= trainers)
        assert max(load.values(), default=0) <= plan.limit


@settings(max_examples=20, deadline=None)
@given(_clusters())
def test_a_trainer_on_the_same_node_feeds_every_worker_itself(cluster):
    plan, _, nodes = cluster
    assert relayed(plan, ("one",) * len(nodes)) == plan


def test_workers_of_a_node_take_turns():
    """Four replicas of TP 1 on one node: each receives about a quarter, and sends it three times."""
    from epfsdp2.engine.topology.index_ranges import ShardStep
    from epfsdp2.engine.topology.mesh import Topology
    from epfsdp2.rollout.layout.vllm_layout import Heads, Rollout, Tensor

    tensors = [Tensor("a", (64, 8), 2, (ShardStep(0, "fsdp", 8),)), Tensor("b", (64, 3), 2, (ShardStep(0, "fsdp", 8),))]

    def needs_of(tensor, rank):
        return [] if rank < 8 else needs(tensor, Rollout(), 0, Heads(1, 1, 1), "full")

    plan = make_plan(tensors, [], Topology.arrange(8, 1), Targets(12, colocated=False), needs_of, 1 << 20)
    relays = relayed(plan, ("trainer",) * 8 + ("rollout",) * 4)
    size = 64 * 11 * 2
    assert relays.between_nodes(lambda r: r // 8, lambda r: r // 8) == dict.fromkeys(range(8, 12), size // 4)
    assert [relays.sent[rank] for rank in range(8, 12)] == [3 * size // 4] * 4
    assert plan.between_nodes(lambda r: r // 8, lambda r: r // 8) == dict.fromkeys(range(8, 12), size)
