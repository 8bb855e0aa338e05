"""Experts cut over ``etp``: the rows and sums of every routing, the order of collectives, updates by verl's worker.

``tests/parity`` compares every family on meshes with ``etp``; loading, resuming and weight syncs have theirs beside the
meshes without it.
"""

import torch
import torch.distributed as dist

from epfsdp2.engine.moe.collectives.rows import AllToAll, Gather
from epfsdp2.engine.moe.dispatch import combine, deferred_router_grad, dispatch
from epfsdp2.engine.moe.overlap import exchange
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.support.engine.recorder import Recorder
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import VOCAB, save_qwen3_moe, token_loss
from tests.support.moe.routing import EXPERTS, D, routings
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import check_ppo_updates

WORLD, INNER = 4, 8


def _plain(hidden, ids, weights, up, down):
    """Compute each token's experts on whole weights."""
    each = torch.einsum("td,tkdi,tkie->tke", hidden, up[ids.long()], down[ids.long()])
    return (each * weights.unsqueeze(-1)).sum(1)


def _every_routing(ep, etp):
    meshes, rank = build_meshes("cpu", Topology.arrange(WORLD, ep, etp_size=etp)), dist.get_rank()
    group = meshes.ep.get_group() if ep > 1 else None
    at, local = meshes.topology.coordinate(rank), EXPERTS // ep
    generator = torch.Generator().manual_seed(7)
    up, down = torch.randn(EXPERTS, D, INNER, generator=generator), torch.randn(EXPERTS, INNER, D, generator=generator)
    mine, part = slice(at["ep"] * local, (at["ep"] + 1) * local), INNER // etp
    columns = slice(at["etp"] * part, (at["etp"] + 1) * part)

    def compute(rows_RD, counts_e, scale_R=None):
        experts_R = torch.repeat_interleave(torch.arange(local), counts_e)
        inner = torch.einsum("rd,rdi->ri", rows_RD, up[mine, :, columns][experts_R])
        out = torch.einsum("ri,rid->rd", inner, down[mine, columns][experts_R])
        return out if scale_R is None else deferred_router_grad(out, scale_R)

    for name, ids in routings(rank, WORLD):
        hidden = torch.randn(ids.shape[0], D, requires_grad=True)
        weights = torch.rand(*ids.shape, requires_grad=True)
        want = _plain(hidden, ids, weights, up, down)
        seed = torch.randn_like(want)
        wanted = [want, *torch.autograd.grad(want, [hidden, weights], seed)]
        sent = dispatch(hidden, ids, EXPERTS, group, meshes.etp_group)
        out = combine(compute(sent.rows_RD, sent.counts_e), sent, weights, group)
        found = {"dispatch": [out, *torch.autograd.grad(out, [hidden, weights], seed)]}
        for chunks in (1, 3) if group is not None else ():
            options = {"num_experts": EXPERTS, "group": group, "etp_group": meshes.etp_group, "chunks": chunks}
            out = exchange(hidden, ids, weights, compute, **options)
            found[f"{chunks} chunks"] = [out, *torch.autograd.grad(out, [hidden, weights], seed)]
        for how, got in found.items():
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=f"{name}, {how}, {ep} x {etp}")


def test_etp_experts_with_every_routing_compute_what_whole_ones_do():
    run_ranks(each_case, WORLD, [(2, 2), (1, 2), (1, 4)], _every_routing)


def _summed(dtype):
    """Three summands of a row of each rank: one by one they would be rounded to what bfloat16 has, 256."""
    rank, sizes = dist.get_rank(), [2, 0, 3]
    gather = Gather(AllToAll([], [], None), sizes, dist.group.WORLD)
    rows = gather(torch.full((sizes[rank], 4), float(rank)))
    others = [r for r in range(3) if r != rank]
    assert rows[:, 0].tolist() == [float(r) for r in [*others, rank] for _ in range(sizes[r])]
    summands = torch.full((sum(sizes), 4), 256.0 if rank == 0 else 1.0, dtype=dtype)
    assert torch.equal(gather.reversed()(summands), torch.full((sizes[rank], 4), 258.0, dtype=dtype))


def test_etp_gather_orders_its_rows_and_its_reverse_adds_summands_in_float32():
    run_ranks(each_case, 3, [(torch.float32,), (torch.bfloat16,)], _summed)


def _same_order(folder, cases):
    rank = dist.get_rank()
    for ep, fsdp_size, options in cases:
        model, _ = sharded_model(folder, WORLD, ep, fsdp_size, 2, **options)
        with Recorder(model.train()) as recorder:
            for step in range(2):
                generator = torch.Generator().manual_seed(100 * step + rank)
                token_loss(model, torch.randint(0, VOCAB, (1, 5 + 7 * rank), generator=generator)).backward()
        everyone = [None] * WORLD
        dist.all_gather_object(everyone, recorder.events)
        assert all(events == everyone[0] for events in everyone), (ep, fsdp_size, options)
        last = recorder.events[::-1]
        # The backward of each experts module ends before its reduction begins.
        for i in range(2):
            reduced = last.index(("reduce", f"layers.{i}.experts"))
            assert ("all-to-all", torch.float32) in last[reduced : last.index(("backward", f"experts {i}"))]


def test_etp_collectives_with_any_routing_come_in_one_order(tmp_path):
    folder = save_qwen3_moe(tmp_path, num_hidden_layers=2, mlp_only_layers=[])
    cases = [(2, -1, {}), (1, -1, {"checkpointing": "full"}), (1, 2, {"expert_shard_dim": 1})]
    cases += [(2, -1, {"dispatch_chunks": 2, "checkpointing": "full"})]
    run_ranks(_same_order, WORLD, folder, cases)


def test_etp_in_ppo_updates_equals_the_plain_model(tmp_path):
    cut = {"ep": 2, "etp_size": 2}
    cases = [
        {**cut, "param_offload": True, "optimizer_offload": True, "activation_checkpointing": "full"},
        {"ep": 1, "etp_size": 2, "fsdp_size": 2, "offload_policy": True},
        {**cut, "ulysses_sequence_parallel_size": 2, "dynamic": True, "dispatch_chunks": 2},
    ]
    run_ranks(check_ppo_updates, WORLD, save_qwen3_moe(tmp_path), cases, timeout=300)
