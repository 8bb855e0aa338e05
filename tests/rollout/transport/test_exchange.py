"""An exchange among real ranks brings each worker its slices in exactly the plan's bytes."""

import itertools

import torch
import torch.distributed as dist

from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.preflight.rollout import tensors_before_sharding
from epfsdp2.rollout.layout.slices import holders
from epfsdp2.rollout.layout.specs import Heads, Rollout
from epfsdp2.rollout.layout.trainer_tensors import sharded_tensor_specs
from epfsdp2.rollout.plan.transfer_plan import ROUND_BUFFERS, Targets, make_transfer_plan
from epfsdp2.rollout.servers import target_slices
from epfsdp2.rollout.transport.exchange import Exchange
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import reference_model, save_glm4_moe, save_qwen3_moe
from tests.support.ranks import run_ranks

WORLD = 4
LIMIT = 6000


def _exchange(model, meshes, rollout, mode, limit=LIMIT, dtype=torch.float32):
    rank, heads = dist.get_rank(), Heads.of(model.config)

    def slices_of(tensor, worker=rank):
        return target_slices(tensor, rollout, worker % rollout.workers, heads, mode)

    targets = Targets(WORLD)
    plan = make_transfer_plan(
        sharded_tensor_specs(model, dtype.itemsize), layer_names(model), meshes.topology, targets, slices_of, limit
    )
    return plan, Exchange(plan, slices_of, rank, "cpu")


def _state(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _facts(tensor, meshes):
    return tensor.name, tensor.shape, tensor.itemsize, holders(tensor, meshes.topology)


def _brings_the_slices(folder, cases):
    rank, whole = dist.get_rank(), _state(reference_model(folder))
    for ep, fsdp_size, dim, rollout, mode, dtype, etp in cases:
        where = str((ep, fsdp_size, dim, rollout, mode, dtype, etp))
        model, meshes = sharded_model(folder, WORLD, ep, fsdp_size, etp, expert_shard_dim=dim)
        tensors = sharded_tensor_specs(model, dtype.itemsize)
        before = tensors_before_sharding(reference_model(folder), meshes.topology, dim, itemsize=dtype.itemsize)
        assert [_facts(t, meshes) for t in tensors] == [_facts(t, meshes) for t in before], where
        plan, exchange = _exchange(model, meshes, rollout, mode, dtype=dtype)
        dtypes = {t.name: dtype if t.name in dict(model.named_parameters()) else torch.float32 for t in tensors}
        order = []
        for name, need, values in exchange.assembled(_state(model), dtypes):
            assert torch.equal(values, whole[name][need.block.slices].to(dtypes[name])), (where, name)
            order.append((name, need))
        heads = Heads.of(model.config)
        wanted = [(t.name, n) for t in tensors for n in target_slices(t, rollout, rank % rollout.workers, heads, mode)]
        assert sorted(order, key=str) == sorted(wanted, key=str), where
        assert len(plan.rounds) > 5
        assert exchange.traffic.sent == plan.sent.get(rank, 0), where
        assert exchange.traffic.received == plan.received.get(rank, 0), where
        digests = [None] * WORLD
        dist.all_gather_object(digests, plan.digest())
        assert len(set(digests)) == 1


CASES = [
    (2, -1, 1, Rollout(2), "sliced", torch.float32, 1),
    (4, -1, 1, Rollout(4), "sliced", torch.bfloat16, 1),
    (1, -1, 0, Rollout(1, 2), "sliced", torch.float32, 1),
    (2, 2, 1, Rollout(2), "sliced", torch.bfloat16, 1),
    (2, -1, 0, Rollout(4, expert_parallel=True), "sliced", torch.float32, 1),
    (2, -1, 1, Rollout(2, 2, expert_parallel=True), "sliced", torch.bfloat16, 1),
    (4, -1, 1, Rollout(2), "full", torch.float32, 1),
    (2, -1, 0, Rollout(4), "sliced", torch.bfloat16, 2),
    (1, -1, 1, Rollout(2), "sliced", torch.float32, 2),
    (1, 2, 0, Rollout(4, expert_parallel=True), "sliced", torch.bfloat16, 2),
    (1, -1, 0, Rollout(2), "full", torch.float32, 4),
]


def test_exchange_brings_every_worker_its_slices_in_the_plans_bytes(tmp_path):
    run_ranks(_brings_the_slices, WORLD, save_qwen3_moe(tmp_path), CASES, timeout=400)


def test_exchange_includes_persistent_buffers(tmp_path):
    cases = [(2, -1, 1, Rollout(2, expert_parallel=True), "sliced", torch.bfloat16, 1)]
    run_ranks(_brings_the_slices, WORLD, save_glm4_moe(tmp_path), cases)


def _one_stops_early(folder):
    model, meshes = sharded_model(folder, WORLD, 2)
    plan, exchange = _exchange(model, meshes, Rollout(2), "sliced")
    dtypes = dict.fromkeys(_state(model), torch.float32)
    blocks = exchange.run(_state(model), dtypes)
    taken = list(itertools.islice(blocks, 3 if dist.get_rank() == 1 else None))
    blocks.close()
    assert len(taken) == 3 or dist.get_rank() != 1
    assert exchange.traffic.received == plan.received[dist.get_rank()]
    dist.barrier()


def test_exchange_whose_consumer_stops_early_blocks_no_rank(tmp_path):
    run_ranks(_one_stops_early, WORLD, save_qwen3_moe(tmp_path))


def _bounded(folder):
    model, meshes = sharded_model(folder, WORLD, 2)
    _, exchange = _exchange(model, meshes, Rollout(2), "sliced")
    sizes = []
    all_to_all = dist.all_to_all_single

    def recording(received, sent, *args, **kwargs):
        sizes.extend([received.numel(), sent.numel()])
        return all_to_all(received, sent, *args, **kwargs)

    dist.all_to_all_single = recording
    for _ in exchange.run(_state(model), dict.fromkeys(_state(model), torch.float32)):
        pass
    dist.all_to_all_single = all_to_all
    assert max(sizes) <= LIMIT and sum(size > LIMIT // 2 for size in sizes) > len(sizes) // 2


def test_exchange_buffers_stay_within_the_limit(tmp_path):
    run_ranks(_bounded, WORLD, save_qwen3_moe(tmp_path))


def _round_by_round(folder):
    """The layers of one round are partly loaded at a time, not those of two."""
    model, meshes = sharded_model(folder, WORLD, 2)
    rank, low = dist.get_rank(), torch.bfloat16
    plan, exchange = _exchange(model, meshes, Rollout(2), "sliced", dtype=low)
    round_of = {
        (plan.tensor(piece)[0], transfer.block): index
        for index, pieces in enumerate(plan.rounds)
        for piece in pieces
        for transfer in plan.transfers(piece)
        if transfer.target == rank
    }
    yielded = [(a.tensor.name, a.block) for a in exchange.run(_state(model), dict.fromkeys(_state(model), low))]
    assert sorted(yielded, key=str) == sorted(round_of, key=str)
    rounds = [round_of[block] for block in yielded]
    assert rounds == sorted(rounds)
    kept = [own for round_ in exchange._local_blocks for own in round_ if own.buffer_range]
    assert kept, "columns that were cast with what is sent are kept for later"
    assert exchange.traffic.peak <= ROUND_BUFFERS * LIMIT


def test_exchange_yields_rounds_one_after_the_other(tmp_path):
    run_ranks(_round_by_round, WORLD, save_qwen3_moe(tmp_path))
