"""One rank's work at the published sizes before its first step and its first save."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.moe.find import find_experts
from epfsdp2.engine.topology.dtensor import local_tensor
from tests.scale.work import matrix_buckets, plan_save, state_of
from tests.support.scale import SIZES, Cost, Size, alone, on_fake_ranks


def _start(size: Size, rank: int) -> dict[str, Any]:
    with on_fake_ranks(size.world, rank):
        model = size.build()
        numel = sum(p.numel() for p in model.parameters())
        sharding, _ = Cost.of(size.shard, model)
        muon, buckets = Cost.of(matrix_buckets, model)
        state = state_of(model)
        saving, files = Cost.of(plan_save, state, rank, size.world)
        local = {name: local_tensor(p).numel() for name, p in model.named_parameters()}
        return {
            "sharding": sharding,
            "layers": len(layer_names(model)),
            "experts": len(find_experts(model)),
            "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
            "groups": len(dist.distributed_c10d._world.pg_map),
            "share": sum(local.values()) * size.world / numel,
            "muon": muon,
            "parameters": len(local),
            "blocks": sum(len(owned) for bucket in buckets for owned in bucket.blocks),
            "own pieces": sum(len(block.pieces) for bucket in buckets for block in bucket.blocks[bucket.rank]),
            "saving": saving,
            "files": len(files),
            "saved": sum(len(file) for file in files.values()),
            "to save": sum(bool(local_tensor(t).numel()) for t in state.values()),
        }


@pytest.fixture(scope="module", params=SIZES, ids=str)
def started(request) -> tuple[Size, dict[str, Any]]:
    size = request.param
    return size, alone(_start, size, size.world - 1)


def test_parallelize_makes_a_unit_for_each_layer_and_for_its_experts(started):
    size, found = started
    assert found["units"] <= found["layers"] + found["experts"] + 3
    assert found["groups"] == 5  # the world, and one for each axis of both meshes that is neither 1 nor it
    assert found["share"] < 1.01
    # FSDP lists the shards of all ranks for each parameter.
    assert found["sharding"].ratio < 0.07 * found["parameters"] + 0.00035 * found["parameters"] * size.world


def test_muon_assigns_matrices_in_time_that_ranks_hardly_change(started):
    size, found = started
    assert found["blocks"] <= 3 * found["parameters"]
    assert found["own pieces"] <= 2 * found["parameters"] + size.world
    assert found["muon"].ratio < 30


def test_a_save_is_planned_by_each_rank_for_itself(started):
    _, found = started
    assert found["files"] == 1
    assert 0 <= found["to save"] - found["saved"] < 0.1 * found["to save"]  # tensors that are not sharded: rank 0's
    assert found["saving"].ratio < 0.015 * found["to save"]
