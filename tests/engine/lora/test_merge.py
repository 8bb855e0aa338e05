"""Cost of merging adapters in a sync: each is gathered once, one weight at a time, in every stream."""

import weakref
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.integration.delta_shards import ShardExport
from epfsdp2.engine.lora import merge
from epfsdp2.engine.lora.adapters import A, B
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.topology.dtensor import is_adapter, local_tensor
from epfsdp2.rollout.layout.specs import Rollout
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from tests.support.engine.lora import sharded_with_adapters, stirred
from tests.support.models.quantised import BLOCK, SIZES
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.rollout.sent_slices import collected, weights_for

WORLD = 4
STREAMS = {
    "full": None,
    "slices of an exchange": Rollout(2),
    "slices of a gather": Rollout(1),
    "whole experts": Rollout(2, expert_parallel=True),
    "FP8 of an exchange": Rollout(2, block=BLOCK),
    "FP8 of a gather": Rollout(1, block=BLOCK),
    "INT8 of an exchange": Rollout(2, channels="int8"),
}


class _Live:
    """Bytes of the tensors that were added and are not freed, and the most at once."""

    def __init__(self):
        self.now = self.most = 0

    def add(self, tensor):
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._free, tensor.nbytes)

    def _free(self, nbytes):
        self.now -= nbytes


def _holds_a_round(folder):
    """Check rounds on one rank, where no bytes of all-to-alls bound them."""
    memory, live = 1 << 22, _Live()
    model, meshes, lora = sharded_with_adapters(folder, 1)
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("sliced", memory))
    values = sync.values()

    def counting(name):
        found = values(name)
        if name in lora.targets:
            live.add(found)
        return found

    for _ in sync.exchange(Rollout()).run(counting):
        pass
    sizes = [model.get_parameter(name).numel() * 4 for name in lora.targets]
    assert live.most <= max(memory // 5, *sizes) + max(sizes) < sum(sizes) / 2


def test_merge_on_one_rank_holds_the_weights_of_a_round_and_not_all(tmp_path):
    run_ranks(_holds_a_round, 1, save_qwen3_moe(tmp_path, **SIZES))


def _sent(sync, stream):
    """Return the tensors that a rank sends to its worker."""
    if stream == "delta":
        return {name: values.clone() for name, values, _ in ShardExport(sync.model, sync.meshes).shards()}
    rollout = STREAMS[stream]
    if rollout is None:
        return {name: values.float() for name, values in sync.full()}
    weights = weights_for(sync, rollout, dist.get_rank() % rollout.workers)
    assert weights.mode == "sliced"
    return {name: values.float() for name, values in collected(weights.tensors()).items()}


def _gathers_once(folder, streams, ep, memory):
    model, meshes, lora = sharded_with_adapters(folder, ep)
    lora.initialize(model, 0, stirred(model))
    names = {id(param): name for name, param in model.named_parameters()}
    # The ranks of an expert's ``ep`` coordinate hold its adapters.
    pairs = [
        sum(model.get_parameter(name + half).numel() * 4 for half in (A, B)) // (ep if target.experts else 1)
        for name, target in lora.targets.items()
    ]
    dtypes = dict.fromkeys((name for name, _ in model.named_parameters()), torch.bfloat16)
    sync = RolloutSync(model, meshes, layer_names(model), dtypes, SyncSettings("sliced", memory))
    with_adapters, gathered = {}, merge._gathered
    for stream in streams:
        counts, live = Counter(), _Live()

        def counting(param, *rest, counts=counts, live=live):
            found = gathered(param, *rest)
            counts[names[id(param)]] += 1
            live.add(found[1])
            return found

        with mock.patch.object(merge, "_gathered", counting):
            with_adapters[stream] = _sent(sync, stream)
        assert counts == dict.fromkeys(filter(is_adapter, names.values()), 1), stream
        assert live.most <= max(pairs) < sum(pairs) / 2, stream
    # A model that has the merged weights, and B = 0, sends the same bits.
    values = merge.local_values(model, "cpu")
    with torch.no_grad():
        for name, param in merge.weights(model):
            local_tensor(param).copy_(values(name, param))
        for name in lora.targets:
            local_tensor(model.get_parameter(name + B)).zero_()
    for stream, expected in with_adapters.items():
        found = _sent(sync, stream)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found), stream


@pytest.mark.parametrize(
    ("ep", "memory"),
    [(2, 1 << 23), *(pytest.param(*case, marks=pytest.mark.long) for case in [(4, 1 << 30), (1, 1 << 23)])],
)
def test_merge_in_any_stream_gathers_each_adapter_once_and_one_weights_at_a_time(tmp_path, ep, memory):
    # A round has room for an expert of every rank, not for a stack.
    folder = save_qwen3_moe(tmp_path, **{**SIZES, "num_experts": 8})
    run_ranks(_gathers_once, WORLD, folder, [*STREAMS, "delta"], ep, memory)
