"""The process group built outside of any torch world, and the messages of its members."""

import os
import pickle
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.topology.index_ranges import ShardStep
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.rollout.layout import specs
from epfsdp2.rollout.remote import messages as published
from epfsdp2.rollout.remote import process_group, remote_sync
from epfsdp2.rollout.remote.process_group import Members, SyncGroup
from epfsdp2.rollout.sent_tensors import SentModel
from epfsdp2.rollout.sync import SyncSettings
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError

SECONDS = 3.0


def _all_to_all(group):
    sent, received = torch.arange(3.0) + 10 * group.rank, torch.empty(3)
    dist.all_to_all_single(received, sent, [1, 1, 1], [1, 1, 1], group=group.process_group)
    return received.tolist()


def test_sync_group_exchanges_and_broadcasts_from_trainer_0(together):
    members, each = together
    assert each(_all_to_all, members) == [[r, 10.0 + r, 20.0 + r] for r in range(3)]
    buckets = [torch.full((2,), float(rank)) for rank in range(3)]
    each(lambda group: None if group.rank == 1 else group.broadcast(buckets[group.rank]).wait(), members)
    assert [bucket[0].item() for bucket in buckets] == [0.0, 1.0, 0.0]


def test_published_message_is_visible_in_one_sync(together):
    (first, second, _), _ = together
    first.begin_sync(), second.begin_sync()
    first.publish("a", ("b", (1, torch.bfloat16)))
    assert second.wait_for("a") == ("b", (1, torch.bfloat16))
    second.begin_sync()
    second.timeout_seconds = 0.1
    with pytest.raises(WeightSyncError, match="no other rank published 'a' within 0.1 s"):
        second.wait_for("a")
    second.syncs = 1
    assert second.wait_for("a") == ("b", (1, torch.bfloat16))
    first.begin_sync()
    with pytest.raises(WeightSyncError, match="published 'a'"):
        second.wait_for("a")


class _Runs:
    ran = False

    def __reduce__(self):
        return setattr, (_Runs, "ran", True)


FOREIGN = [
    pickle.dumps(_Runs()),
    b"{",
    b'{"__kind__": "Popen", "args": ["true"]}',
    b'{"__dtype__": "load"}',
    b'{"a": 1}',
]
FOREIGN.append(b'{"__kind__": "Rollout", "no_such_field": 1}')


def test_published_messages_are_received_unchanged_and_foreign_entries_refused(together):
    (first, second, _), _ = together
    first.begin_sync(), second.begin_sync()
    cut = ShardStep(0, "ep", 2)
    tensors = (specs.TensorSpec("a", (4, 2, 3), 2, (cut, ShardStep(1, "ep_fsdp", 2))), specs.TensorSpec("b", (), 4))
    heads = specs.Heads(4, 2, 8, "gemma4_text", layers=((2, 8, False), (1, 16, True)))
    dtypes = (("a", torch.bfloat16), ("b", torch.float32))
    sharded = SentModel(tensors, dtypes, ("layers.0",), Topology.arrange(8, 2, 4), heads)
    messages = {
        "layout": published.TrainerLayout(SyncSettings("auto", 1 << 20, 2), sharded, '{"r": 4}'),
        "request": published.WorkerRequest("sliced", specs.Rollout(2, 2, True, block=128), 3),
        "header": (("a", torch.float32, (4, 2)), ("b", torch.bfloat16, ())),
        "digest": "abc",
        "nothing": None,
    }
    for name, message in messages.items():
        first.publish(name, message)
        received = second.wait_for(name)
        assert received == message and repr(received) == repr(message)
    assert hash(second.wait_for("layout")) == hash(messages["layout"])

    with pytest.raises(TypeError, match="Event is not a message type"):
        first.publish("another", threading.Event())
    for written in FOREIGN:
        first._store.set("1/a", written)
        with pytest.raises(WeightSyncError, match="the store holds an entry that is not a message"):
            second.wait_for("a")
    assert not _Runs.ran


@pytest.mark.parametrize("is_like_nccl", [False, True])
def test_abort_on_error_publishes_the_cause_and_ends_all_waits(together, is_like_nccl):
    members, each = together

    def part(group):
        with pytest.raises(WeightSyncError) as caught, group.abort_on_error():
            if group.rank == 2:
                raise ValueError("a fault that the test injected")
            group.finish(_LikeNccls()) if is_like_nccl else _all_to_all(group)
        return str(caught.value)

    started = time.monotonic()
    causes = each(part, members)
    assert time.monotonic() - started < SECONDS
    assert causes[2] == "weight sync failed on rollout rank 0: ValueError: a fault that the test injected"
    for rank in (0, 1):
        cause = "rollout rank 0: ValueError: a fault that the test injected"
        assert causes[rank] == f"weight sync failed on trainer rank {rank}: {cause}"
    assert all(group.failed and group.process_group is None for group in members)
    with pytest.raises(WeightSyncError, match="a fault that the test injected"):
        members[0].wait_for("anything")


class _LikeNccls:
    """A collective that the others never complete: its wait neither blocks the host nor raises."""

    def is_completed(self):
        return False

    def wait(self):
        return True


def test_sync_group_waits_on_the_host_for_rounds_and_buckets(together):
    (first, *_), _ = together
    first.timeout_seconds = 0.1
    heads = specs.Heads(4, 2, 8, "qwen3_moe")
    tensors = (specs.TensorSpec("model.norm.weight", (4,), 2, (ShardStep(0, "fsdp", 2),)),)
    dtypes = (("model.norm.weight", torch.bfloat16),)
    sharded = SentModel(tensors, dtypes, (), Topology(2, 1, 2, 1), heads)
    layout = published.TrainerLayout(SyncSettings("auto", 1 << 20), sharded)
    exchange = remote_sync.Endpoint(first)._plan(layout, specs.Rollout(1), [0])
    never = mock.patch.object(dist, "all_to_all_single", lambda *args, **kwargs: _LikeNccls())
    with never, pytest.raises(WeightSyncError, match="another rank took no part in a collective within 0.1 s"):
        list(exchange.run(lambda name: torch.ones(2, dtype=torch.bfloat16)))
    first.broadcast = lambda bucket: _LikeNccls()
    with pytest.raises(WeightSyncError, match="took no part"):
        remote_sync.send_buckets(first, "bucket", iter({"a": torch.ones(4)}.items()), 8)


@pytest.mark.parametrize("before", [None, "0"])
def test_sync_group_of_nccl_when_constructed_sets_blocking_wait(monkeypatch, before):
    """NCCL's backend reads the variable when it is constructed; without it a time-out kills the process."""
    made = []

    def construct(store, rank, size, options):
        made.append((os.environ["TORCH_NCCL_BLOCKING_WAIT"], options._timeout.total_seconds()))

    construct.Options = SimpleNamespace
    monkeypatch.setattr(dist, "ProcessGroupNCCL", construct, raising=False)
    if before is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
    process_group._nccl(dist.HashStore(), 0, 1)
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before and made == [("1", 86400.0)]


def test_abort_on_error_reports_the_collectives_error_behind_torchs(together, tmp_path):
    """Runs in a process with a torch world, like a trainer's."""
    members, _ = together
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(WeightSyncError, match="RuntimeError: .*size") as caught, members[0].abort_on_error():
            dist.all_to_all_single(torch.empty(3), torch.empty(4), [1, 1, 1], [1, 1, 1], group=members[0].process_group)
        assert "world group map" in str(caught.value.__cause__)
    finally:
        dist.destroy_process_group()


def test_sync_group_refuses_other_devices():
    with pytest.raises(WeightSyncError, match="neither supports device xpu"):
        SyncGroup(dist.HashStore(), 0, Members(1, 1), "xpu", SECONDS)
