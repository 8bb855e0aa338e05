"""Weight syncs at published sizes: what a trainer rank plans, and what it runs in Python in a sync."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.wrap_plan import compute_dtypes
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.topology.mesh import build_meshes
from epfsdp2.rollout.layout.specs import Rollout
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.transport.report import Traffic
from tests.support.scale import SIZES, Cost, Size, alone, growth, on_fake_ranks

MEMORY = 2048 << 20
# A rollout of each size, and the rounds and parameters of its sync.
ROLLOUTS = dict(
    zip(
        SIZES,
        [(Rollout(4), 146, 435), (Rollout(8), 284, 849), (Rollout(8), 0, 0), (Rollout(16), 364, 1033)],
        strict=True,
    )
)


class _Done(dist.Work):
    def wait(self, *args):
        return True


@contextmanager
def _no_bytes():
    """Let collectives do nothing, since a fake group has no backend for meta tensors."""
    with (
        mock.patch.object(dist, "all_to_all_single", lambda *args, **options: _Done()),
        mock.patch.object(dist, "all_gather_into_tensor", lambda *args, **options: _Done()),
    ):
        yield


def _sync_of(size: Size) -> RolloutSync:
    """Make an exporter of a sharded model whose buffers are on meta."""
    meshes, options = build_meshes("cpu", size.topology), ShardingOptions(param_dtype=torch.bfloat16)
    model = parallelize(size.build(torch.float32), meshes, options)
    sync = RolloutSync(
        model, meshes, layer_names(model), compute_dtypes(model, options), SyncSettings("auto", MEMORY, server="vllm")
    )
    sync.device = "meta"
    return sync


def _planned(sync: RolloutSync, rollout: Rollout):
    """Plan a sync with all that is planned once."""
    exchange = sync.exchange(rollout, 0)
    for _, template, number in exchange.plan.rounds:
        exchange._route(template, number)
    return exchange


def _run(sync: RolloutSync, rollout: Rollout) -> int:
    return sum(1 for _ in sync.exchange(rollout, 0).run(sync.values("merged", rollout)))


def _costs(size: Size, rollout: Rollout) -> dict:
    with on_fake_ranks(size.world), _no_bytes():
        sync = _sync_of(size)
        planning, exchange = Cost.of(_planned, sync, rollout)
        digest, _ = Cost.of(exchange.plan.digest)
        first, parameters = Cost.of(_run, sync, rollout)
        again, _ = Cost.of(_run, sync, rollout)
        return {
            "plan": planning.ratio,
            "digest": digest.ratio,
            "first": first.ratio,
            "again": again.ratio,
            "parameters": parameters,
            "rounds": len(list(exchange.plan.rounds)),
            "peak": exchange.traffic.peak,
            "seconds": f"plan {planning}, digest {digest}, first {first}, again {again}",
        }


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sync_of_a_published_size_has_few_parameters_and_little_python(size):
    rollout, rounds, parameters = ROLLOUTS[size]
    found = alone(_costs, size, rollout)
    assert (found["rounds"], found["parameters"]) == (rounds, parameters)
    assert parameters <= 2000 and found["peak"] <= MEMORY
    assert found["plan"] <= 40 and found["digest"] <= 10
    assert found["first"] <= 15 and found["again"] <= 10


def _full(size: Size) -> dict:
    with on_fake_ranks(size.world), _no_bytes():
        sync = _sync_of(size)
        first, tensors = Cost.of(lambda: sum(1 for _ in sync.full(Traffic())))
        again, _ = Cost.of(lambda: sum(1 for _ in sync.full(Traffic())))
        return {"tensors": tensors, "first": first.ratio, "again": again.ratio, "seconds": f"{first}, again {again}"}


@pytest.mark.parametrize(("size", "tensors"), zip(SIZES[:2], (531, 1037), strict=True), ids=str)
def test_full_sync_of_a_published_size_plans_once(size, tensors):
    found = alone(_full, size)
    assert found["tensors"] == tensors
    assert found["again"] <= 40


def _growth(size: Size, what: str) -> dict:
    rollout = Rollout(8)

    def prepare(each: Size):
        sync = _sync_of(each)
        if what == "sync":
            _planned(sync, rollout)
        return sync, rollout

    with _no_bytes():
        return growth(prepare, _planned if what == "plan" else _run, size)


@pytest.mark.parametrize("what", ["plan", "sync"])
def test_twice_the_ranks_cost_at_most_twice_as_much(what):
    found = alone(_growth, Size("Qwen3-235B-A22B", 256, 8, layers=4), what)
    assert found["calls"] <= 2.2 and found["seconds"] <= 2.2
