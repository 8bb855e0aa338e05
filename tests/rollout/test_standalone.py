"""Full tensors in bounded buckets, and plans that have to be one, among three members in threads."""

from types import SimpleNamespace

import pytest
import torch

from epfsdp2.rollout.remote import remote_sync
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from tests.support.peers import three_members

LIMIT = 1000


@pytest.fixture
def together():
    with three_members(5.0) as members:
        yield members


def _tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "larger than a bucket": torch.randn(37, 19, generator=generator),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "odd": torch.arange(7, dtype=torch.uint8),
        "transposed": torch.randn(6, 5, generator=generator).T,
        "small": torch.randn(100, generator=generator).bfloat16(),
    }


def test_full_tensors_come_in_order_through_bounded_buckets(together):
    members, each = together
    buckets = list(remote_sync._buckets(_tensors().items(), LIMIT, torch.device("cpu")))
    assert [bucket.numel() for _, bucket in buckets[:-1]] == [LIMIT] * (len(buckets) - 1) and len(buckets) == 4

    def part(peers):
        if peers.rank < 2:
            return remote_sync.Sender(peers).send(iter(_tensors().items()), LIMIT)
        return list(remote_sync.Receiver(peers).receive())

    for _ in range(2):
        first, second, got = each(part, members)
        each(lambda peers: peers.end(), members)
        wanted = _tensors()
        assert [name for name, _ in got] == list(wanted)
        for name, tensor in got:
            assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
        assert first["weight_sync/sent_megabytes"] * 2**20 == sum(t.nbytes for t in wanted.values())
        assert second == {}


class _Fixed(remote_sync._Road):
    """Comes to the plan that it is told."""

    planned = 0

    def _plan(self, offer, wants):
        self.planned += 1
        return SimpleNamespace(plan=SimpleNamespace(digest=lambda: self.says))


def test_members_with_another_plan_stop_and_equal_ones_are_not_planned_again(together):
    members, each = together
    roads, offers = [_Fixed(peers) for peers in members], [remote_sync.Offer("auto", 0, "a", n) for n in (1, 1, 2)]
    for road, says in zip(roads, "aab", strict=True):
        road.says = says

    def part(road, offer):
        road.peers.begin()
        if road.says == "a":
            return road._exchange(offer, [])
        with pytest.raises(WeightSyncError, match="this rank's plan is b, that of trainer rank 0 is a"):
            road._exchange(offer, [])

    for offer in offers:
        each(lambda road, offer=offer: part(road, offer), roads)
    assert [road.planned for road in roads] == [2, 2, 2]
