"""An exchange among real ranks brings each worker its parameters in exactly the plan's bytes."""

import itertools
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.preflight.rollout import tensors_before_sharding
from epfsdp2.engine.topology.index_ranges import shard_ranges
from epfsdp2.rollout.layout.specs import Rollout
from epfsdp2.rollout.plan.transfer_plan import ROUND_BUFFERS
from epfsdp2.rollout.sent_tensors import tensor_specs
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.transport.report import Traffic
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import reference_model, save_glm4_moe, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.rollout.sent_slices import collected, weights_for
from tests.support.rollout.units import check_stored, stored_parameters, worker_slices

WORLD = 4
LIMIT = 1 << 16
MEMORY = ROUND_BUFFERS * LIMIT


def _sync(folder, mesh=(2, -1, 1, 1), dtype=torch.float32):
    ep, fsdp_size, dim, etp = mesh
    model, meshes = sharded_model(folder, dist.get_world_size(), ep, fsdp_size, etp, expert_shard_dim=dim)
    dtypes = dict.fromkeys((name for name, _ in model.named_parameters()), dtype)
    return RolloutSync(model, meshes, layer_names(model), dtypes, SyncSettings("sliced", MEMORY))


def _state(model):
    return {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in model.state_dict()}}


def _whole_parameters(sync, whole, rollout, worker):
    """Return a worker's parameters, cut from whole tensors, and the masks of their filled elements."""
    tensors = ((spec.name, whole[spec.name].detach()) for spec in sync.sent_model().tensors)
    cast = ((name, tensor.to(sync.dtypes[name])) for name, tensor in tensors)
    return stored_parameters(worker_slices(cast, rollout, worker, sync.heads))


def _planned_bytes(exchange):
    """Return the bytes that this rank sends to others and receives: their slices, and every short tensor whole."""
    plan, member = exchange.plan, exchange.member
    own, sent, received = dist.get_rank() % plan.topology.fsdp, 0, 0
    others = [rank for rank in range(plan.topology.fsdp) if rank != own]
    for _, round_ in plan.rounds:
        shares = [share for share in round_.shares if not share.is_whole]
        long = sum((share.bundle.sent(share.part, share.parts) for share in shares), 0 * plan.sent)
        short = round_.whole_offsets[1]
        if plan.targets.are_gathered:  # messages are as long as the longest
            sent += len(others) * int(long.max() + short)
            received += len(others) * int(long.max() + short)
            continue
        sent += sum(int(long[own, member.targets[rank]]) + short for rank in others)
        received += sum(int(long[rank, member.kind]) + short for rank in others)
    return sent, received


def _facts(tensor, meshes):
    coordinates = map(meshes.topology.coordinate, range(meshes.topology.fsdp))
    held = [[r for r in shard_ranges(tensor.shape, tensor.cuts, at) if r.numel] for at in coordinates]
    return tensor.name, tensor.shape, tensor.itemsize, held


def _brings_the_parameters(cases):
    for folder, mesh, rollout, dtype in cases:
        where, reference = str((folder.name, mesh, rollout, dtype)), reference_model(folder)
        sync = _sync(folder, mesh, dtype)
        topology, worker = sync.meshes.topology, dist.get_rank() % rollout.workers
        tensors = tensor_specs(sync.model, dtype.itemsize)
        before = tensors_before_sharding(reference, topology, mesh[2], itemsize=dtype.itemsize)
        assert [_facts(t, sync.meshes) for t in tensors] == [_facts(t, sync.meshes) for t in before], where
        for number in range(2):
            with torch.no_grad():
                for each in (sync.model, reference):
                    for param in _state(each).values() if number else ():
                        param.mul_(-1.5)
            weights = weights_for(sync, rollout, worker)
            found = collected(weights.tensors())
            check_stored(found, _whole_parameters(sync, _state(reference), rollout, worker), (where, number))
            exchange = weights.sync.exchange(weights._rollout)
            assert (weights.traffic.sent, weights.traffic.received) == _planned_bytes(exchange), where
            assert weights.traffic.held == 0 < weights.traffic.peak <= MEMORY, (where, weights.traffic.peak)
        assert len(list(exchange.plan.rounds)) > 5
        digests = [None] * WORLD
        dist.all_gather_object(digests, exchange.plan.digest())
        assert len(set(digests)) == 1


CASES = [
    ("plain", (2, 2, 1, 1), Rollout(2), torch.bfloat16),
    ("plain", (2, -1, 0, 1), Rollout(4, expert_parallel=True), torch.float32),
    ("plain", (2, -1, 1, 1), Rollout(2, 2, expert_parallel=True), torch.bfloat16),
    ("plain", (4, -1, 1, 1), Rollout(1), torch.bfloat16),
    ("plain", (2, -1, 0, 2), Rollout(4), torch.bfloat16),
    ("with buffers", (2, -1, 1, 1), Rollout(2, expert_parallel=True), torch.bfloat16),
    ("tied", (2, -1, 1, 1), Rollout(2), torch.bfloat16),
]
MORE_CASES = [
    ("plain", (2, -1, 1, 1), Rollout(2), torch.float32),
    ("plain", (4, -1, 1, 1), Rollout(4), torch.bfloat16),
    ("plain", (1, -1, 0, 1), Rollout(1, 2), torch.float32),
    ("plain", (1, -1, 1, 2), Rollout(2), torch.float32),
    ("plain", (1, 2, 0, 2), Rollout(4, expert_parallel=True), torch.bfloat16),
    ("plain", (1, -1, 0, 4), Rollout(1), torch.float32),
    ("tied", (2, -1, 1, 1), Rollout(1), torch.float32),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.long)], ids=["some", "others"])
def test_exchange_brings_every_worker_its_parameters_in_the_plans_bytes_sync_after_sync(tmp_path, cases):
    save_qwen3_moe(tmp_path / "plain")
    save_qwen3_moe(tmp_path / "tied", tie_word_embeddings=True)
    save_glm4_moe(tmp_path / "with buffers")
    run_ranks(_brings_the_parameters, WORLD, [(tmp_path / name, *case) for name, *case in cases], timeout=400)


@contextmanager
def _recorded(events):
    """Append the bytes that every all-to-all receives and sends."""
    all_to_all = dist.all_to_all_single

    def recording(received, sent, *args, **kwargs):
        events.append((received.numel(), sent.numel()))
        return all_to_all(received, sent, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", recording):
        yield


def _round_by_round(folder):
    """Rounds have a limit, parameters come in their order, and the next round is in flight while they are used."""
    sync, events = _sync(folder), []
    exchange, traffic = sync.exchange(Rollout(2)), Traffic()
    with _recorded(events):
        for found in exchange.run(sync.values(), traffic):
            events.append((found.parameter, found.first, found.step))
    rounds = [len(event) == 2 for event in events]
    sizes = [max(event) for event in events if len(event) == 2]
    assert max(sizes) <= LIMIT and sum(size > LIMIT // 2 for size in sizes) > len(sizes) // 3
    expected = [
        [
            (exchange.plan.layers[layer][0], arrival.share.part, arrival.share.parts)
            for arrival in exchange._routes[exchange.plan.templates[template].rounds[number]].arrivals
        ]
        for layer, (_, template) in enumerate(exchange.plan.layers)
        for number in range(len(exchange.plan.templates[template].rounds))
    ]
    assert sum(rounds) == len(expected)
    # Two rounds have begun when the first parameter comes, and one more for each completed round.
    begun = list(itertools.accumulate(rounds))
    at = iter(zip(events, begun, strict=True))
    for number, arrivals in enumerate(expected):
        for prefix, first, step in arrivals:
            event, started = next(pair for pair in at if len(pair[0]) == 3)
            assert event[0].startswith(prefix) and event[1:] == (first, step)
            assert started == min(number + 2, len(expected))
    assert not [event for event, _ in at if len(event) == 3]
    assert traffic.peak <= MEMORY

    # A consumer that stops early leaves the others their parameters.
    rank, traffic = dist.get_rank(), Traffic()
    parameters = exchange.run(sync.values(), traffic)
    taken = list(itertools.islice(parameters, 3 if rank == 1 else None))
    parameters.close()
    assert len(taken) == 3 or rank != 1
    assert (traffic.sent, traffic.received) == _planned_bytes(exchange)


def test_exchange_runs_bounded_rounds_in_order_also_if_a_consumer_stops_early(tmp_path):
    run_ranks(_round_by_round, WORLD, save_qwen3_moe(tmp_path))
