"""A process group made by hand, outside of any torch world, and the facts that its members tell each other."""

import pickle
import threading
import time

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.topology.index_ranges import ShardStep
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.rollout.layout import vllm_layout
from epfsdp2.rollout.remote import remote_sync
from epfsdp2.rollout.remote.process_group import Members, Peers
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from tests.support.peers import three_members

SECONDS = 3.0


@pytest.fixture
def together():
    with three_members(SECONDS) as members:
        yield members


def _all_to_all(peers):
    sent, received = torch.arange(3.0) + 10 * peers.rank, torch.empty(3)
    dist.all_to_all_single(received, sent, [1, 1, 1], [1, 1, 1], group=peers.group)
    return received.tolist()


def test_members_exchange_and_trainer_0_broadcasts_to_the_rollout(together):
    members, each = together
    assert each(_all_to_all, members) == [[r, 10.0 + r, 20.0 + r] for r in range(3)]
    buckets = [torch.full((2,), float(rank)) for rank in range(3)]
    each(lambda peers: None if peers.rank == 1 else peers.broadcast(buckets[peers.rank]).wait(), members)
    assert [bucket[0].item() for bucket in buckets] == [0.0, 1.0, 0.0]


def test_a_fact_is_there_for_one_sync(together):
    (first, second, _), _ = together
    first.begin(), second.begin()
    first.tell("a", {"b": (1, torch.bfloat16)})
    assert second.ask("a") == {"b": (1, torch.bfloat16)}
    second.begin()
    with pytest.raises(WeightSyncError, match="no other rank said 'a' within 3 s"):
        second.ask("a")
    first.end()
    third = Peers.__new__(Peers)
    third.__dict__ |= first.__dict__
    third.timeout_seconds = 0.1
    with pytest.raises(WeightSyncError, match="said 'a'"):
        third.ask("a")


class _Runs:
    ran = False

    def __reduce__(self):
        return setattr, (_Runs, "ran", True)


@pytest.mark.parametrize(
    "written",
    [
        pickle.dumps(_Runs()),
        b"{",
        b'{"__kind__": "Popen", "args": ["true"]}',
        b'{"__kind__": "Rollout", "no_such_field": 1}',
        b'{"__dtype__": "load"}',
    ],
)
def test_what_somebody_else_writes_into_the_store_is_refused_and_never_run(together, written):
    (first, second, _), _ = together
    first.begin(), second.begin()
    first._store.set("1/a", written)
    with pytest.raises(WeightSyncError, match="the store holds what no member tells"):
        second.ask("a")
    assert not _Runs.ran
    with pytest.raises(TypeError, match="tell each other no Event"):
        first.tell("b", threading.Event())


def test_what_a_sync_tells_arrives_as_it_was(together):
    (first, second, _), _ = together
    first.begin(), second.begin()
    cut = ShardStep(0, "ep", 2)
    tensors = (vllm_layout.Tensor("a", (4, 2, 3), 2, (cut, ShardStep(1, "ep_fsdp", 2))), vllm_layout.Tensor("b", (), 4))
    heads, dtypes = vllm_layout.Heads(4, 2, 8, "qwen3_moe"), (("a", torch.bfloat16), ("b", torch.float32))
    sharded = remote_sync.Sharded(tensors, dtypes, ("layers.0",), Topology.arrange(8, 2, 4), heads)
    chunks = [remote_sync._Chunk("a", torch.float32, (4, 2), 0, 16, 32)]
    facts = {
        "offer": remote_sync.Offer("auto", 2, "qwen3_moe", 1 << 20, sharded),
        "want": remote_sync.Want("sliced", vllm_layout.Rollout(2, 2, True), 3),
        "chunks": tuple(chunks),
        "digest": "abc",
        "nothing": None,
    }
    for name, fact in facts.items():
        first.tell(name, fact)
        arrived = second.ask(name)
        assert arrived == fact and repr(arrived) == repr(fact)
    assert hash(second.ask("offer")) == hash(facts["offer"])


def test_who_fails_says_why_and_nobody_waits(together):
    members, each = together

    def part(peers):
        with pytest.raises(WeightSyncError) as caught, peers.guarded():
            if peers.rank == 2:
                raise ValueError("a fault that the test injected")
            _all_to_all(peers)
        return str(caught.value)

    started = time.monotonic()
    said = each(part, members)
    assert time.monotonic() - started < SECONDS
    assert said[2] == "weight sync failed on rollout rank 0: ValueError: a fault that the test injected"
    for rank in (0, 1):
        cause = "rollout rank 0: ValueError: a fault that the test injected"
        assert said[rank] == f"weight sync failed on trainer rank {rank}: {cause}"
    assert all(peers.failed for peers in members)
    with pytest.raises(WeightSyncError, match="a fault that the test injected"):
        members[0].ask("anything")


def test_an_error_of_a_collective_is_seen_behind_torchs_own(together, tmp_path):
    """In a process that has a torch world, as a trainer's has."""
    members, _ = together
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(WeightSyncError, match="RuntimeError: .*size") as caught, members[0].guarded():
            dist.all_to_all_single(torch.empty(3), torch.empty(4), [1, 1, 1], [1, 1, 1], group=members[0].group)
        assert "world group map" in str(caught.value.__cause__)
    finally:
        dist.destroy_process_group()


def test_other_devices_are_refused():
    with pytest.raises(WeightSyncError, match="neither of which works on xpu"):
        Peers(dist.HashStore(), 0, Members(1, ("one",)), "xpu", SECONDS)
