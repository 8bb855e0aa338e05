"""Full tensors in bounded buckets, and the comparison of plans, among three members in threads."""

from types import SimpleNamespace

import pytest
import torch

from epfsdp2.rollout.remote import buckets as filling
from epfsdp2.rollout.remote import messages, remote_sync
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from tests.support.rollout.peers import three_members

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


def test_sender_broadcasts_full_tensors_in_order_in_bounded_buckets(together):
    members, each = together
    buckets = list(filling.buckets_of(_tensors().items(), LIMIT, torch.device("cpu")))
    assert [bucket.numel() for _, bucket in buckets[:-1]] == [LIMIT] * (len(buckets) - 1) and len(buckets) == 4

    def part(group):
        if group.rank < 2:
            return remote_sync.Sender(group).send(iter(_tensors().items()), LIMIT)
        return list(remote_sync.Receiver(group).receive())

    for _ in range(2):
        first, second, got = each(part, members)
        each(lambda group: group.end_sync(), members)
        wanted = _tensors()
        assert [name for name, _ in got] == list(wanted)
        for name, tensor in got:
            assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
        assert first["weight_sync/sent_megabytes"] * 2**20 == sum(t.nbytes for t in wanted.values())
        assert second == {}


class _Fixed(remote_sync._Endpoint):
    """Makes a plan with the digest that it is given."""

    planned = 0

    def _plan(self, layout, requests):
        self.planned += 1
        return SimpleNamespace(plan=SimpleNamespace(digest=lambda: self.digest))


def test_endpoint_raises_on_a_differing_plan_and_caches_equal_ones(together):
    members, each = together
    endpoints, layouts = (
        [_Fixed(group) for group in members],
        [messages.TrainerLayout("auto", 0, "a", n) for n in (1, 1, 2)],
    )
    for endpoint, digest in zip(endpoints, "aab", strict=True):
        endpoint.digest = digest

    def part(endpoint, layout):
        endpoint.group.begin_sync()
        if endpoint.digest == "a":
            return endpoint._exchange(layout, [])
        with pytest.raises(WeightSyncError, match="this rank's plan is b, that of trainer rank 0 is a"):
            endpoint._exchange(layout, [])

    for layout in layouts:
        each(lambda endpoint, layout=layout: part(endpoint, layout), endpoints)
    assert [endpoint.planned for endpoint in endpoints] == [2, 2, 2]
