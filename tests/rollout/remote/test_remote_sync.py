"""Full tensors in buckets, and plans on which members have to agree, among three of them in threads."""

from types import SimpleNamespace

import pytest
import torch

from epfsdp2.engine.compat import versions
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.rollout.layout.specs import Heads, Rollout
from epfsdp2.rollout.remote.messages import TrainerLayout, WorkerRequest
from epfsdp2.rollout.remote.remote_sync import Endpoint, ReceivedWeights
from epfsdp2.rollout.sent_tensors import SentModel
from epfsdp2.rollout.sync import SyncSettings
from epfsdp2.rollout.transport.buckets import buckets_of
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from tests.support.rollout.sent_slices import config_for

LIMIT = 1000


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


def test_full_tensors_are_broadcast_in_order_in_buckets_of_bounded_size(together):
    members, each = together
    buckets = list(buckets_of(_tensors().items(), lambda nbytes: torch.empty(max(LIMIT, nbytes), dtype=torch.uint8)))
    names = [["larger than a bucket"], ["none", "scalar", "odd", "transposed", "small"]]
    assert [[name for name, *_ in header] for header, *_ in buckets] == names
    # A larger tensor has a bucket of its own; every tensor begins at a multiple of 16 bytes.
    assert [bucket.numel() for _, bucket, _ in buckets] == [37 * 19 * 4, 16 + 16 + 128 + 200]
    assert [is_last for *_, is_last in buckets] == [False, True]

    def part(group):
        if group.rank < 2:
            return Endpoint(group).send(iter(_tensors().items()), LIMIT)
        return list(Endpoint(group).receive())

    for _ in range(2):
        first, second, got = each(part, members)
        wanted = _tensors()
        assert [name for name, _ in got] == list(wanted)
        for name, tensor in got:
            assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
        assert first["weight_sync/sent_megabytes"] * 2**20 == sum(bucket.numel() for _, bucket, _ in buckets)
        assert second == {}


class _Fixed(Endpoint):
    """Makes plans with a fixed digest."""

    planned, digest = 0, "a"

    def _plan(self, layout, rollout, workers):
        self.planned += 1
        return SimpleNamespace(plan=SimpleNamespace(digest=lambda: self.digest))


def test_endpoint_raises_on_a_differing_plan_and_plans_again_for_another_layout_or_rollout(together):
    members, each = together
    endpoints = [_Fixed(group) for group in members]
    endpoints[2].digest = "b"

    def part(endpoint):
        endpoint.group.begin_sync()
        if endpoint.digest == "a":
            return endpoint.exchange(layout, requests)
        with pytest.raises(WeightSyncError, match="this rank's plan is b, that of trainer rank 0 is a"):
            endpoint.exchange(layout, requests)

    for limit, tp, needs_base, planned in ((1, 2, True, 1), (1, 2, False, 1), (2, 2, False, 2), (2, 1, False, 3)):
        layout = TrainerLayout(SyncSettings("auto", limit))
        requests = [WorkerRequest("sliced", Rollout(tp), 0, needs_base)]
        each(part, endpoints)
        assert [endpoint.planned for endpoint in endpoints] == [planned] * 3


@pytest.mark.parametrize(("requested", "differs"), [("auto", False), ("auto", True), ("sliced", True)])
def test_release_on_trial_gets_slices_or_full_tensors_by_what_its_workers_found(
    together, monkeypatch, caplog, requested, differs
):
    members, each = together
    monkeypatch.setattr(versions, "untested", lambda name: f"{name} 9.9 was not tested with")
    model = SentModel((), (), (), Topology.arrange(2, 2), Heads(4, 2, 16, "qwen3_moe"))
    layout = TrainerLayout(SyncSettings(requested, 1), model)
    endpoints = [Endpoint(group) for group in members]
    failure = WeightSyncError("worker 0 of a replica:\nthey differ") if differs else None

    def part(endpoint):
        endpoint.group.begin_sync()
        if endpoint.group.rank < 2:
            return endpoint.compared(endpoint.requests())
        weights = ReceivedWeights(endpoint, layout).for_rollout(config_for(Rollout(1)), 0)
        if weights.mode == "full" or endpoint.is_compared:
            endpoint.requests(weights._request)
        else:
            assert weights.has_checksums
            weights.check_plans(failure)
        return weights.mode

    if requested == "sliced":
        with pytest.raises(WeightSyncError, match="they differ"):
            part(endpoints[2])
        return
    for _ in range(2):
        assert each(part, endpoints) == ["full" if differs else "sliced"] * 3
    reason = "vllm 9.9 was not tested with: worker 0 of a replica: they differ"
    assert [reason in record.getMessage() for record in caplog.records] == [True, True] * differs
