"""The registered experts function under random meshes, routings and layouts, against a dense loop over all tokens."""

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from epfsdp2.engine.moe.forward import ExpertsRuntime, attach, experts_forward
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.support.ranks import run_ranks

EXAMPLES = 120  # for each world
D = 6


@dataclass(frozen=True)
class Example:
    ep: int
    fsdp_size: int
    experts: int
    top_k: int
    tokens: tuple[int, ...]  # on each rank
    routing: str
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    weights_dtype: torch.dtype
    ids_dtype: torch.dtype
    seed: int


def _examples(world):
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    meshes = [(ep, replica) for replica in divisors for ep in divisors if replica % ep == 0]

    @st.composite
    def example(draw):
        ep, replica = draw(st.sampled_from(meshes))
        return Example(
            ep,
            replica,
            experts=ep * draw(st.integers(1, 4)),
            top_k=draw(st.integers(1, 3)),
            tokens=tuple(draw(st.lists(st.integers(0, 6), min_size=world, max_size=world))),
            routing=draw(st.sampled_from(["random", "one expert", "an expert twice", "one rank", "first half"])),
            has_gate=draw(st.booleans()),
            has_bias=draw(st.booleans()),
            is_transposed=draw(st.booleans()),
            weights_dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
            ids_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
            seed=draw(st.integers(0, 2**16)),
        )

    return example()


class _Experts(nn.Module):
    """An experts module as transformers' decorator leaves it."""

    def __init__(self, e, inner):
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = e.has_gate, e.has_bias, e.is_transposed
        up, rows = ("gate_up_proj" if e.has_gate else "up_proj"), inner * (2 if e.has_gate else 1)
        shapes = {up: (e.experts, rows, D), "down_proj": (e.experts, D, inner)}
        if e.is_transposed:
            shapes = {name: (a, c, b) for name, (a, b, c) in shapes.items()}
        if e.has_bias:
            shapes |= {f"{up}_bias": (e.experts, rows), "down_proj_bias": (e.experts, D)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))
        self.act_fn = F.silu

    def _apply_gate(self, x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


def _dense(module, hidden, ids, weights):
    """Every slot on its own."""
    own = dict(module.named_parameters())
    up = "gate_up_proj" if module.has_gate else "up_proj"
    out = hidden * 0 + weights.sum() * 0
    for t in range(hidden.shape[0]):
        for k in range(ids.shape[1]):
            x = hidden[t]
            for name in (up, "down_proj"):
                w = own[name][ids[t, k]]
                x = x @ (w if module.is_transposed else w.T)
                x = x + own[f"{name}_bias"][ids[t, k]] if module.has_bias else x
                if name == up:
                    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
            out[t] = out[t] + x * weights[t, k]
    return out


def _route(e, rank, world):
    g = torch.Generator().manual_seed(e.seed + rank)
    shape, local = (e.tokens[rank], e.top_k), e.experts // e.ep
    ids = torch.randint(0, e.experts, shape, generator=g)
    if e.routing == "one expert":
        ids = torch.full(shape, e.seed % e.experts)
    elif e.routing == "an expert twice":
        ids = ids[:, :1].expand(shape).contiguous()
    elif e.routing == "one rank":
        ids = torch.randint(0, local, shape, generator=g) + (e.seed % e.ep) * local
    elif e.routing == "first half":
        ids = torch.randint(0, max(1, e.experts // 2), shape, generator=g)
    hidden = torch.randn(e.tokens[rank], D, generator=g)
    weights = torch.rand(shape, generator=g).to(e.weights_dtype)
    return hidden.requires_grad_(), ids.to(e.ids_dtype), weights.requires_grad_()


def _check(e, meshes):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(e.seed)
    dense = _Experts(e, inner=4)
    torch.manual_seed(e.seed)
    module = _Experts(e, inner=4)
    for name, param in list(module.named_parameters()):
        cut = distribute_tensor(param.detach(), meshes.ep, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut))
    attach(module, ExpertsRuntime(e.experts, meshes.ep.get_group() if e.ep > 1 else None))

    everyone = [_route(e, r, world) for r in range(world)]
    group = range(rank // e.ep * e.ep, rank // e.ep * e.ep + e.ep)  # the ranks whose tokens reach this one's experts
    seeds = [torch.randn(e.tokens[r], D, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    hidden, ids, weights = everyone[rank]
    before = ids.clone()
    out = experts_forward(module, hidden, ids, weights)
    (out * seeds[rank]).sum().backward()
    assert torch.equal(ids, before), "routing was changed"
    assert out.dtype == hidden.dtype

    for r in group:
        h, i, w = everyone[r] if r != rank else (x.detach().clone() for x in everyone[r])
        h.requires_grad_(), w.requires_grad_()
        want = _dense(dense, h, i.long(), w)
        (want * seeds[r]).sum().backward()
        if r == rank:
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(hidden.grad, h.grad, rtol=1e-4, atol=1e-5)
            loose = {"rtol": 1e-4, "atol": 1e-5} if e.weights_dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
            torch.testing.assert_close(weights.grad, w.grad, **loose)
    local, first = e.experts // e.ep, rank % e.ep * (e.experts // e.ep)
    for name, param in module.named_parameters():
        assert param.grad is not None, f"{name} has no gradient on this rank alone"
        wanted = dict(dense.named_parameters())[name].grad
        wanted = torch.zeros(param.shape) if wanted is None else wanted
        torch.testing.assert_close(param.grad.to_local(), wanted[first : first + local], rtol=1e-4, atol=1e-5)


def _all_examples(world):
    ran = []

    @functools.cache
    def meshes(ep, fsdp_size):
        return build_meshes("cpu", Topology.arrange(world, ep, fsdp_size))

    # Derandomised, so that every rank draws the same; no shrinking, which ranks would do apart.
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_examples(world))
    def every(example):
        error = ""
        try:
            _check(example, meshes(example.ep, example.fsdp_size))
        except AssertionError as failure:
            error = f"rank {dist.get_rank()}: {example}: {failure}"
        # All ranks stop at the first failure of any: one that went on alone would wait for the others.
        errors = [None] * world
        dist.all_gather_object(errors, error)
        assert not any(errors), next(e for e in errors if e)
        ran.append(example)

    every()
    assert len(set(ran)) >= EXAMPLES * 0.9
    assert {e.routing for e in ran} == {"random", "one expert", "an expert twice", "one rank", "first half"}
    assert any(0 in e.tokens for e in ran) and any(not any(e.tokens) for e in ran)


@pytest.mark.parametrize("world", [pytest.param(3, marks=pytest.mark.long), 4])
def test_experts_with_any_routing_on_any_mesh_equal_the_dense_loop(world):
    run_ranks(_all_examples, world, world, timeout=400)
