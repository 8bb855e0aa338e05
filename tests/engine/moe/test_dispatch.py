"""Dispatch and combine under any routing, against a dense loop in one process."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from epfsdp2.engine.moe.dispatch import combine, dispatch, start_dispatch_plans
from epfsdp2.engine.moe.forward import grouped_linear
from tests.support.moe.routing import EXPERTS, D, K, routings
from tests.support.ranks import run_ranks


def _expected(hidden, ids, weights, scale_E):
    """Compute the dense loop: expert e multiplies its rows by scale_E[e]."""
    return (hidden.unsqueeze(1) * scale_E[ids].unsqueeze(-1) * weights.unsqueeze(-1)).sum(1)


def _every_routing():
    world, rank = dist.get_world_size(), dist.get_rank()
    local = EXPERTS // world
    scale_E = torch.arange(1.0, EXPERTS + 1)
    for name, ids in routings(rank, world):
        hidden = torch.randn(ids.shape[0], D, requires_grad=True)
        weights = torch.rand(ids.shape[0], K, requires_grad=True)
        before = ids.clone()
        sent = dispatch(hidden, ids, EXPERTS, dist.group.WORLD)
        assert torch.equal(ids, before), name
        mine = scale_E[rank * local : (rank + 1) * local].clone().requires_grad_()
        rows = sent.rows_RD * torch.repeat_interleave(mine, sent.counts_e).unsqueeze(-1)
        out = combine(rows, sent, weights, dist.group.WORLD)
        reference = _expected(hidden, ids.long(), weights, scale_E)
        torch.testing.assert_close(out, reference, msg=name)
        seed = torch.randn_like(out)
        got = torch.autograd.grad(out, [hidden, weights], seed)
        want = torch.autograd.grad(reference, [hidden, weights], seed)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, msg=name)


@pytest.mark.parametrize(("experts", "dtype"), [(128, torch.int16), (2**15, torch.int16), (2**15 + 1, torch.int64)])
def test_sort_slots_of_any_experts_uses_the_smallest_keys(monkeypatch, experts, dtype):
    """A GPU's radix sort takes a pass for each byte of a key."""
    ids = torch.randint(0, experts, (50, K), generator=torch.Generator().manual_seed(0))
    ids[7, 0] = experts - 1
    sort, sorted_by = torch.sort, []
    monkeypatch.setattr(torch, "sort", lambda keys, **how: sorted_by.append(keys.dtype) or sort(keys, **how))
    (plan,) = start_dispatch_plans(ids, experts, None).wait()
    assert sorted_by == [dtype] and torch.equal(plan.slot_order, sort(ids.reshape(-1), stable=True).indices)
    assert torch.equal(plan.counts_e, torch.bincount(ids.reshape(-1), minlength=experts))


def test_dispatch_with_every_routing_equals_the_dense_loop():
    run_ranks(_every_routing, 4)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 9),
    ids=st.lists(st.integers(0, EXPERTS - 1), min_size=18, max_size=18),
    seed=st.integers(0, 1000),
)
def test_dispatch_on_one_rank_with_any_routing_equals_the_dense_loop(tokens, ids, seed):
    torch.manual_seed(seed)
    ids_TK = torch.tensor(ids).view(9, K)[:tokens]
    hidden, weights = torch.randn(tokens, D), torch.rand(tokens, K)
    scale_E = torch.randn(EXPERTS)
    sent = dispatch(hidden, ids_TK, EXPERTS, None)
    out = combine(sent.rows_RD * torch.repeat_interleave(scale_E, sent.counts_e).unsqueeze(-1), sent, weights, None)
    torch.testing.assert_close(out, _expected(hidden, ids_TK, weights, scale_E))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", [[0, 3, 0, 5], [0, 0, 0, 0], [8, 0, 0, 0]])
def test_grouped_linear_with_empty_groups_equals_a_loop_over_groups(dtype, transposed, counts):
    weight = torch.randn(4, 32, 16, dtype=dtype, requires_grad=True)
    bias = torch.randn(4, 16 if transposed else 32, dtype=dtype, requires_grad=True)
    rows = torch.randn(sum(counts), 32 if transposed else 16, dtype=dtype, requires_grad=True)
    out = grouped_linear(rows, weight, torch.tensor(counts), bias, transposed)
    pieces = torch.split(rows, counts)
    want = torch.cat([p @ (w if transposed else w.T) + b for p, w, b in zip(pieces, weight, bias, strict=True)])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(out, want, **tolerance)
    seed = torch.randn_like(out)
    got = torch.autograd.grad(out, [rows, weight, bias], seed)
    assert got[1] is not None and got[1].shape == weight.shape
    for g, w in zip(got, torch.autograd.grad(want, [rows, weight, bias], seed), strict=True):
        torch.testing.assert_close(g, w, **tolerance)
    for expert, count in enumerate(counts):
        assert count or not got[1][expert].any()
