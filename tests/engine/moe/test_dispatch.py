"""Every way from tokens to experts and back, under any routing, against a dense loop in one process."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig

from epfsdp2.engine.moe import deepep, overlap
from epfsdp2.engine.moe.collectives.rows import AllToAll, Gather
from epfsdp2.engine.moe.dispatch import start_dispatch_plans
from epfsdp2.engine.moe.forward import ExpertsRuntime, attach, experts_forward
from epfsdp2.engine.moe.gemm.backends import TORCH
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.support.moe.experts import bytes_kept, make
from tests.support.ranks import each_case, run_ranks

WORLD, EXPERTS, K, D, INNER = 4, 8, 2, 6, 8
SIZES = {"hidden_size": D, "moe_intermediate_size": INNER, "num_experts": EXPERTS}


def _routings(rank):
    """Return expert ids [T, K] by name; the ranks' differ, and some leave ranks or experts without tokens."""
    generator = torch.Generator().manual_seed(rank)
    random = torch.randint(0, EXPERTS, (7, K), generator=generator)
    return {
        "random": random,
        "all to one expert": torch.full((6, K), 3),
        "an expert twice in one token": torch.full((4, K), rank % EXPERTS),
        "nobody here": random[:0] if rank == 0 else random,
        "nobody anywhere": random[:0],
        "one rank receives all": torch.randint(0, EXPERTS // WORLD, (5, K), generator=generator),
        "different counts": random[: rank + 1],
        "int32 ids": random.int(),
    }


def _dense(module, hidden, ids, weights):
    """Compute each token's experts with whole weights."""
    up = torch.einsum("td,tkod->tko", hidden, module.gate_up_proj[ids.long()])
    each = torch.einsum("tki,tkdi->tkd", module._apply_gate(up), module.down_proj[ids.long()])
    return (each * weights.unsqueeze(-1)).sum(1)


class DocumentedBuffer:
    """The part of ``deep_ep.Buffer`` that DeepEP 1.2.1 documents, over gloo; DeepEP itself is not installed."""

    def get_dispatch_layout(self, topk_idx, num_experts):
        world = dist.get_world_size()
        in_rank = torch.stack([(topk_idx // (num_experts // world) == r).any(1) for r in range(world)], dim=1)
        per_expert = torch.bincount(topk_idx.reshape(-1), minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(self, x, handle=None, is_token_in_rank=None, topk_idx=None, topk_weights=None, **layout):
        in_rank = is_token_in_rank if handle is None else handle[0]
        going = [in_rank[:, r].nonzero().squeeze(1) for r in range(dist.get_world_size())]
        arrived = torch.cat(tokens := self._to_each([x[rows] for rows in going]))
        if handle is not None:
            return arrived, None, None, None, None, None
        local = layout["num_tokens_per_expert"].numel() // dist.get_world_size()
        ids = torch.cat(self._to_each([topk_idx[rows] for rows in going])) - dist.get_rank() * local
        mine = (ids >= 0) & (ids < local)
        weights = torch.cat(self._to_each([topk_weights[rows] for rows in going])) * mine
        counts = torch.bincount(ids[mine], minlength=local).tolist()
        handle = in_rank, going, [len(rows) for rows in tokens]
        return arrived, torch.where(mine, ids, -1), weights, counts, handle, None

    def combine(self, x, handle, topk_weights=None):
        in_rank, going, sizes = handle

        def summed(rows):
            out = rows.new_zeros(in_rank.shape[0], rows.shape[1])
            for where, part in zip(going, self._to_each(list(rows.split(sizes))), strict=True):
                out[where] += part
            return out

        return summed(x), None if topk_weights is None else summed(topk_weights), None

    def _to_each(self, pieces):
        """Return every rank's piece for this rank, by rank."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, pieces)
        return [theirs[dist.get_rank()] for theirs in everyone]


class _NoAtomics(TorchDispatchMode):
    """Refuses sums of rows whose order differs from run to run on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        adds = func.overloadpacket.__name__ in ("index_add", "index_add_", "scatter_add", "scatter_add_")
        assert not adds or args[0].dim() == 1  # a weight has one row, and so one summand
        return func(*args, **(kwargs or {}))


def _ways(group, etp_group):
    """Return the runtimes of all ways by name."""
    runtime = partial(ExpertsRuntime, EXPERTS, group, etp_group=etp_group)
    ways = {name: runtime(name) for name in ("torch", "reference", "transformers:batched_mm")}
    options = {"num_experts": EXPERTS, "group": group}
    for backend, chunks in (("torch", 1), ("reference", 2), ("torch", 9)) if group is not None else ():
        exchange = partial(overlap.exchange, **options, etp_group=etp_group, chunks=chunks)
        ways[f"{chunks} chunks, {backend}"] = runtime(backend, exchange)
    if group is not None and etp_group is None and group.size() == WORLD:
        buffer = DocumentedBuffer()
        exchange = partial(deepep.exchange, **options, backend=TORCH, buffer=lambda group, row_bytes: buffer)
        ways["deepep"] = runtime("torch", exchange)
    return ways


def _every_way(ep, etp):
    meshes, rank = build_meshes("cpu", Topology.arrange(WORLD, ep, etp_size=etp)), dist.get_rank()
    at, plain = meshes.topology.coordinate(rank), make("plain", config=partial(Qwen3MoeConfig, **SIZES))
    parts = ("ep", EXPERTS // ep), ("etp", INNER // etp)
    mine, columns = (slice(at.get(axis, 0) * part, (at.get(axis, 0) + 1) * part) for axis, part in parts)
    own = copy.deepcopy(plain)

    def cut(up, down):
        halves = up[mine].unflatten(1, (2, INNER))
        return halves[:, :, columns].flatten(1, 2), down[mine, :, columns]

    for name, part in zip(("gate_up_proj", "down_proj"), cut(plain.gate_up_proj, plain.down_proj), strict=True):
        setattr(own, name, nn.Parameter(part.detach().clone()))
    ways = _ways(meshes.ep.get_group() if ep > 1 else None, meshes.etp_group)
    block = range(rank // (ep * etp) * ep * etp, (rank // (ep * etp) + 1) * ep * etp)  # ranks that reach these experts
    routings = [_routings(r) for r in range(WORLD)]
    for name in routings[0]:
        wanted, sums = {}, 0
        for r in block:
            ids, generator = routings[r][name], torch.Generator().manual_seed(r)
            hidden = torch.randn(len(ids), D, generator=generator).requires_grad_()
            weights = torch.rand(ids.shape, generator=generator).requires_grad_()
            out = _dense(plain, hidden, ids, weights)
            seed = torch.linspace(-1, 1, out.numel()).view_as(out)
            grads = torch.autograd.grad(out, [hidden, weights, plain.gate_up_proj, plain.down_proj], seed)
            wanted[r] = hidden, ids, weights, seed, [out, *grads[:2]]
            sums = [grad + total for grad, total in zip(grads[2:], sums or (0, 0), strict=True)]
        hidden, ids, weights, seed, want = wanted[rank]
        want += cut(*sums)
        for way, runtime in ways.items():
            attach(own, runtime)
            given = ids.clone()
            out = experts_forward(own, hidden, given, weights)
            # A parameter without a gradient on one rank alone would raise here.
            got = out, *torch.autograd.grad(out, [hidden, weights, own.gate_up_proj, own.down_proj], seed)
            assert torch.equal(given, ids), (name, way)
            with torch.no_grad():
                got += (experts_forward(own, hidden, given, weights),)
            for i, (a, b) in enumerate(zip(got, (*want, want[0]), strict=True)):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=f"{name}, {way}, {ep} x {etp}, {i}")
        if "deepep" in ways:
            of_the_host = mock.patch.object(torch, "tensor", side_effect=AssertionError("this waits for the device"))
            with _NoAtomics(), of_the_host:
                torch.autograd.grad(experts_forward(own, hidden, ids, weights.detach()), hidden, seed)


def _summed(dtype):
    """Add four summands: one by one they would be rounded to what bfloat16 has, 256."""
    rank, sizes = dist.get_rank(), [2, 0, 3, 1]
    gather = Gather(AllToAll([], [], None), sizes, dist.group.WORLD)
    rows = gather(torch.full((sizes[rank], 4), float(rank)))
    others = [r for r in range(WORLD) if r != rank]
    assert rows[:, 0].tolist() == [float(r) for r in [*others, rank] for _ in range(sizes[r])]
    summands = torch.full((sum(sizes), 4), 256.0 if rank == 0 else 1.0, dtype=dtype)
    assert torch.equal(gather.reversed()(summands), torch.full((sizes[rank], 4), 259.0).to(dtype))


def _kept():
    """Send the same number of rows from each rank to every expert: the rank of the tokens saves nothing."""
    hidden, inner = 64, 24
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": EXPERTS // WORLD}
    module, ids = make("plain", config=partial(Qwen3MoeConfig, **sizes)), torch.arange(16).view(-1, K) % EXPERTS
    given = torch.randn(len(ids), hidden, requires_grad=True), ids, torch.rand(ids.shape, requires_grad=True)
    kept = {}
    for backend in ("torch", "reference"):
        attach(module, ExpertsRuntime(EXPERTS, dist.group.WORLD, backend))
        kept[backend] = bytes_kept(lambda: experts_forward(module, *given), [*given, *module.parameters()])
    # Rows, their weights, the first product, and the orders of slots and of rows.
    assert kept["torch"] == ids.numel() * (4 * (hidden + 1 + 2 * inner) + 2 * 8) < 0.6 * kept["reference"]


def _all():
    each_case([(4, 1), (2, 1), (2, 2), (1, 4)], _every_way)
    each_case([(torch.float32,), (torch.bfloat16,)], _summed)
    _kept()


def test_experts_with_every_routing_and_way_equal_the_dense_loop():
    run_ranks(_all, WORLD, timeout=400)


@pytest.mark.parametrize(("experts", "dtype"), [(2**15, torch.int16), (2**15 + 1, torch.int64)])
def test_sort_slots_of_any_experts_uses_the_smallest_keys(monkeypatch, experts, dtype):
    """A GPU's radix sort takes a pass for each byte of a key."""
    ids = torch.randint(0, experts, (50, K), generator=torch.Generator().manual_seed(0))
    ids[7, 0] = experts - 1
    sort, sorted_by = torch.sort, []
    monkeypatch.setattr(torch, "sort", lambda keys, **how: sorted_by.append(keys.dtype) or sort(keys, **how))
    (plan,) = start_dispatch_plans(ids, experts, None).wait()
    assert sorted_by == [dtype] and torch.equal(plan.slot_order, sort(ids.reshape(-1), stable=True).indices)
    assert torch.equal(plan.counts_e, torch.bincount(ids.reshape(-1), minlength=experts))
