"""Clipping by one norm over both meshes, and steps that are skipped."""

import functools
import itertools
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from epfsdp2.engine.optim.clip import ClippedStep, clip_grad_norm_
from epfsdp2.engine.optim.multi_optimizer import MultiOptimizer
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.support.logs import logged_lines
from tests.support.ranks import each_case, run_ranks

WORLD = 4
MESHES = [(1, -1), (4, -1), (2, 2)]


@functools.cache
def _meshes(ep, fsdp_size=-1):
    return build_meshes("cpu", Topology.arrange(WORLD, ep, fsdp_size))


def _parameters(meshes, dtype=torch.float32, scale=1.0):
    """Return dense and expert parameters with gradients, and their full gradients, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    axes = [(meshes.dense, [Replicate(), Shard(0)]), (meshes.experts, [Replicate(), Shard(1), Shard(0)])]
    shapes = [(8, 5), (7,), (8, 8, 3), (4, 4)]
    params, grads = [], []
    for shape, (mesh, placements) in zip(shapes, [axes[0], axes[0], axes[1], axes[1]], strict=True):
        grads.append((torch.randn(shape, generator=generator) * scale).to(dtype))
        param = nn.Parameter(distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, placements))
        param.grad = distribute_tensor(grads[-1], mesh, placements)
        params.append(param)
    return [*params, nn.Parameter(torch.zeros(3))], grads  # the last has no gradient


def _reference(grads):
    return torch.linalg.vector_norm(torch.cat([g.double().reshape(-1) for g in grads]))


def _one_norm_and_one_coefficient():
    """One all-reduce and one pass over the gradients."""
    for ep, fsdp_size in MESHES:
        meshes = _meshes(ep, fsdp_size)
        for dtype, max_norm in itertools.product((torch.float32, torch.bfloat16), (0.5, 1e9, None, 0.0, float("inf"))):
            params, grads = _parameters(meshes, dtype)
            before = [p.grad.to_local()._version for p in params[:4]]
            with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
                norm = clip_grad_norm_(params, max_norm, meshes)
            assert reduced.call_count == 1
            passes = [p.grad.to_local()._version - v for p, v in zip(params, before, strict=False)]
            assert passes == [int(max_norm == 0.5)] * 4, (max_norm, passes)
            want = _reference(grads)
            assert norm.dtype == torch.float32 and abs(norm / want - 1) < 1e-6, (ep, fsdp_size, dtype)
            factor = 0.5 / (want + 1e-6) if max_norm == 0.5 else 1.0
            for param, grad in zip(params, grads, strict=False):
                torch.testing.assert_close(param.grad.full_tensor(), (grad * factor).to(dtype))


def _accumulated_in_float32():
    meshes = _meshes(2)
    ones = distribute_tensor(torch.ones(2**16, dtype=torch.bfloat16), meshes.dense, [Replicate(), Shard(0)])
    param = nn.Parameter(torch.zeros_like(ones))
    param.grad = ones
    # bfloat16 stops counting at 256.
    assert clip_grad_norm_([param], None, meshes).item() == 256.0
    params, grads = _parameters(meshes, torch.bfloat16, scale=1e15)
    assert abs(clip_grad_norm_(params, None, meshes) / _reference(grads) - 1) < 1e-6


def _copies_count_once():
    """A shard that several ranks hold counts once."""
    meshes = _meshes(2)
    grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for mesh, placements in (
        (meshes.experts, [Replicate(), Replicate(), Shard(0)]),
        (meshes.experts, [Replicate(), Shard(0), Replicate()]),
        (meshes.dense, [Replicate(), Replicate()]),
    ):
        param = nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, placements))
        param.grad = distribute_tensor(grad, mesh, placements)
        assert abs(clip_grad_norm_([param], None, meshes) / grad.norm() - 1) < 1e-6


def _replicas_agree(bad):
    """Clip gradients that differ between replicas, as on GPUs, or of which one is bad."""
    meshes = _meshes(1, 2)
    params, _ = _parameters(meshes)
    for param in params[:4]:
        if dist.get_rank() >= 2:
            param.grad.to_local().mul_(1 + 2**-20)
    if dist.get_rank() == 3 and bad is not None:
        params[0].grad.to_local()[0] = bad
    norm = clip_grad_norm_(params, 0.5, meshes)
    norms = [torch.empty_like(norm) for _ in range(WORLD)]
    dist.all_gather(norms, norm)
    assert all(torch.equal(other.view(torch.int32), norm.view(torch.int32)) for other in norms), norms
    assert bool(norm.isfinite()) == (bad is None)


def _skipped_everywhere(bad):
    lines, rank = logged_lines(), dist.get_rank()
    meshes = _meshes(2)
    params, _ = _parameters(meshes)
    dense, experts = [params[0], params[1]], [params[2], params[3]]
    inner = {"dense": torch.optim.AdamW(dense), "experts": torch.optim.AdamW(experts)}
    optimizer = MultiOptimizer(inner, [(f"p{i}", p) for i, p in enumerate(params)])
    step = ClippedStep(0.5, meshes)
    assert torch.isfinite(step(optimizer)) and step.skipped == 0
    before = [p.detach().full_tensor() for p in params[:4]]
    moments = [optimizer.state[p]["exp_avg"].full_tensor() for p in params[:4]]
    for count in (1, 2):
        fresh, _ = _parameters(meshes)
        for param, other in zip(params[:4], fresh, strict=False):
            param.grad = other.grad
        if rank == 2:  # on one rank only, in an expert
            params[2].grad.to_local()[0] = bad
        assert not torch.isfinite(step(optimizer))
        assert step.skipped == count
        assert all(p.grad is None for p in params[:4])
    for param, value, moment in zip(params, before, moments, strict=False):
        assert torch.equal(param.detach().full_tensor(), value)
        assert torch.equal(optimizer.state[param]["exp_avg"].full_tensor(), moment)
        assert optimizer.state[param]["step"] == 1
    assert len(lines) == (2 if rank == 0 else 0)
    assert rank or ("skipped on all ranks (2 so far)" in lines[1])


def _each_check():
    checks = [(_one_norm_and_one_coefficient,), (_accumulated_in_float32,), (_copies_count_once,)]
    checks += [(_replicas_agree, bad) for bad in (None, float("inf"))]
    checks += [(_skipped_everywhere, bad) for bad in (float("nan"), float("inf"))]
    each_case(checks, lambda check, *args: check(*args))


def test_clip_has_one_norm_over_all_meshes_and_skips_steps_that_are_not_finite_on_all_ranks():
    run_ranks(_each_check, WORLD)
