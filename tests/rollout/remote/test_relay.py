"""Plans with relays send each block over the network once per node, and relay it in the same round."""

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from epfsdp2.rollout.layout.transfer_plan import Targets, make_transfer_plan
from epfsdp2.rollout.remote.relay import with_relays
from epfsdp2.rollout.servers import target_slices
from tests.support.rollout.plans import problems


@st.composite
def _clusters(draw):
    """Draw a plan whose targets are numbered after the trainer's ranks, and the node of each rank."""
    tensors, topology, rollout, heads, _, mode, limit = draw(problems())
    trainers, replicas = topology.world, draw(st.integers(1, 3))

    def slices_of(tensor, rank):
        return (
            [] if rank < trainers else target_slices(tensor, rollout, (rank - trainers) % rollout.workers, heads, mode)
        )

    world = trainers + replicas * rollout.workers
    targets = Targets(world, colocated=False)
    # A worker that relays a row sends it once per other worker of its node.
    plan = make_transfer_plan(tensors, ["model.layers.0", "model.layers.1"], topology, targets, slices_of, 12 * limit)
    return plan, trainers, tuple(draw(st.sampled_from("abc")) for _ in range(world))


@settings(max_examples=60, deadline=None)
@given(_clusters())
def test_with_relays_sends_each_block_to_a_node_once(cluster):
    plan, trainers, nodes = cluster
    relays = with_relays(plan, nodes)
    for (name, before), (_, after) in zip(plan.tensors(), relays.tensors(), strict=True):
        assert Counter((t.block, t.target) for t in before.transfers) == Counter(
            (t.block, t.target) for t in after.transfers
        ), name
        crossings = Counter((t.block, nodes[t.target]) for t in after.transfers if nodes[t.source] != nodes[t.target])
        assert all(times == 1 for times in crossings.values()), name
        for t in after.transfers:
            assert t.source < trainers or nodes[t.source] == nodes[t.target]
    assert sum(relays.received.values()) == sum(plan.received.values())

    for pieces in relays.rounds:
        load, come = Counter(), defaultdict(set)
        for piece in pieces:
            transfers = list(relays.transfers(piece))
            for t in transfers:
                load["from", t.source] += 2 * t.block.numel
                load["to", t.target] += 2 * t.block.numel
                if t.source < trainers:
                    come[t.target].add((piece, t.block))
            assert all((piece, t.block) in come[t.source] for t in transfers if t.source >= trainers)
        assert max(load.values(), default=0) <= plan.limit


@settings(max_examples=20, deadline=None)
@given(_clusters())
def test_with_relays_on_one_node_changes_nothing(cluster):
    plan, _, nodes = cluster
    assert with_relays(plan, ("one",) * len(nodes)) == plan


def test_with_relays_rotates_the_relaying_worker():
    """With four replicas of TP 1 on one node, each receives a quarter and sends it three times."""
    from epfsdp2.engine.topology.index_ranges import ShardStep
    from epfsdp2.engine.topology.mesh import Topology
    from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec

    tensors = [
        TensorSpec("a", (64, 8), 2, (ShardStep(0, "fsdp", 8),)),
        TensorSpec("b", (64, 3), 2, (ShardStep(0, "fsdp", 8),)),
    ]

    def slices_of(tensor, rank):
        return [] if rank < 8 else target_slices(tensor, Rollout(), 0, Heads(1, 1, 1), "full")

    plan = make_transfer_plan(tensors, [], Topology.arrange(8, 1), Targets(12, colocated=False), slices_of, 1 << 20)
    relays = with_relays(plan, ("trainer",) * 8 + ("rollout",) * 4)
    size = 64 * 11 * 2
    assert relays.between_nodes(lambda r: r // 8, lambda r: r // 8) == dict.fromkeys(range(8, 12), size // 4)
    assert [relays.sent[rank] for rank in range(8, 12)] == [3 * size // 4] * 4
    assert plan.between_nodes(lambda r: r // 8, lambda r: r // 8) == dict.fromkeys(range(8, 12), size)
