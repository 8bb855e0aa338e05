"""The Triton kernels, in Triton's interpreter, equal torch's operators; sizes are no multiples of a tile."""

import importlib
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from epfsdp2.engine.moe import forward
from epfsdp2.engine.moe.gemm import backends
from epfsdp2.engine.moe.gemm.backends import Groups, TorchBackend
from tests.support.engine import sharded_model
from tests.support.experts import (
    FAMILIES,
    RELATIVE,
    D,
    assert_equal,
    make,
    routed,
    rows_with,
    tokens_with,
)
from tests.support.models import reference_model, relative_error, save_qwen3_moe, token_batch, token_loss
from tests.support.ranks import run_ranks

COUNTS = [21, 0, 3, 17, 0]
BFLOAT16 = 1e-2


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Import the kernels interpreted, which Triton decides at import."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        yield importlib.import_module("epfsdp2.engine.moe.gemm.triton_backend")


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("capability", "mm", "outer"),
    [
        ((8, 6), "triton", "triton"),
        ((9, 0), "torch", "torch"),
        ((10, 0), "torch", "triton"),  # torch has a kernel that leaves garbage for experts without rows
        ((10, 3), "torch", "triton"),
        ((11, 0), "triton", "triton"),  # torch loops over the experts
        ((12, 0), "triton", "triton"),
    ],
)
def test_mixed_takes_the_grouped_gemm_that_torch_has_a_right_kernel_for(kernels, monkeypatch, capability, mm, outer):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    torchs = SimpleNamespace(mm=lambda *args: "torch", outer=lambda *args: "torch")
    monkeypatch.setattr(kernels.MixedBackend, "_torch", torchs)
    for operator in ("mm", "outer"):
        monkeypatch.setattr(kernels.TritonBackend, operator, lambda *args: "triton")
    monkeypatch.setattr(kernels.TritonBackend, "gate", lambda *args: "fused")
    rows = torch.empty(64, 16, dtype=torch.bfloat16, device="meta")
    weight, mixed = rows.new_empty(4, 16, 16), kernels.MixedBackend()
    assert (mixed.mm(rows, weight, None), mixed.outer(rows, rows, None)) == (mm, outer)
    assert mixed.gate(None, torch.bfloat16) == (None if mm == "torch" else "fused")
    assert mixed.gate(None, torch.float16) == "fused"


def test_torch_leaves_no_garbage_for_experts_without_rows_where_its_kernel_does(monkeypatch):
    """As CUTLASS on compute capability 10.x (pytorch#172439)."""
    groups, rows = Groups(torch.tensor(COUNTS), sum(COUNTS)), drawn(sum(COUNTS), 16)
    want = TorchBackend().outer(rows, rows, groups)
    grouped_mm, asked = backends.torch_grouped_mm, []

    def leaves_garbage(a, b, offs):
        asked.append(offs)
        empty = (groups.counts_e == 0)[:, None, None]
        return grouped_mm(a, b, offs=offs).masked_fill(empty, float("nan"))

    for place in (backends, forward):
        monkeypatch.setattr(place, "torch_grouped_mm", leaves_garbage)
    monkeypatch.setattr(backends, "_on_cpu", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert relative_error(TorchBackend().outer(rows, rows, groups), want) < 1e-6 and len(asked) == 1
    weight = drawn(len(COUNTS), 16, 16).requires_grad_()
    forward.grouped_linear(rows, weight, groups.counts_e, None, False).sum().backward()
    assert len(asked) == 1, "autograd would compute the weight's gradient with it"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, BFLOAT16), (torch.float16, 1e-3)])
def test_triton_operators_equal_torch(kernels, dtype, bound):
    ours, twin = kernels.TritonBackend(), TorchBackend()
    x, tokens = drawn(7, 19, dtype=dtype), torch.tensor([6, 0, 3, 3, 5])
    assert torch.equal(ours.take(x, tokens), twin.take(x, tokens))
    slots = torch.tensor([[0, 4, 6], [1, 1, 2]])
    for weights in (None, drawn(2, 3), drawn(2, 3, dtype=dtype)):
        got, want = (backend.gather_sum(x, slots, weights, torch.float32) for backend in (ours, twin))
        assert relative_error(got, want) < bound
    groups, rows = Groups(torch.tensor(COUNTS), sum(COUNTS)), drawn(sum(COUNTS), 37, dtype=dtype)
    weight, bias = drawn(len(COUNTS), 37, 23, dtype=dtype), drawn(len(COUNTS), 23, dtype=dtype)
    for in_out in (weight, weight.mT.contiguous().mT):
        for b in (None, bias):
            got, want = (backend.mm(rows, in_out, groups, b) for backend in (ours, twin))
            assert got.dtype == dtype and relative_error(got.float(), want.float()) < bound
    other = drawn(sum(COUNTS), 18, dtype=dtype, seed=1)
    got, want = (backend.outer(rows, other, groups) for backend in (ours, twin))
    assert relative_error(got.float(), want.float()) < bound
    assert not got[1].any() and not got[4].any()


def test_triton_gemms_and_sums_accumulate_in_float32(kernels):
    """In bfloat16 a sum of ones stops at 256."""
    ours, n = kernels.TritonBackend(), 1024
    ones, groups = torch.ones(n, n, dtype=torch.bfloat16), Groups(torch.tensor([0, n]), n)
    assert (ours.mm(ones[:1], torch.ones(1, n, 3).bfloat16(), Groups(torch.tensor([1]), 1)) == n).all()
    assert (ours.outer(ones[:, :3], ones[:, :2], groups)[1] == n).all()
    assert (ours.gather_sum(ones[:, :3], torch.arange(n).view(1, n), None, torch.float32) == n).all()


@pytest.mark.parametrize("backend", ["triton", "mixed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_triton_experts_of_every_layout_equal_plain_operators(kernels, family, backend):
    module, inputs = make(family), routed()
    fused = kernels.TritonBackend().gate(module, torch.float32)
    assert (fused is None) == (family == "no gate")
    assert_equal(tokens_with(module, backend, *inputs), tokens_with(module, "reference", *inputs))
    counts_e = torch.tensor([18, 0, 4, 0, 1, 3])
    rows = drawn(int(counts_e.sum()), D)
    assert_equal(rows_with(module, backend, rows, counts_e), rows_with(module, "reference", rows, counts_e))
    none = counts_e * 0
    assert_equal(rows_with(module, backend, rows[:0], none), rows_with(module, "reference", rows[:0], none))


@pytest.mark.parametrize("family", FAMILIES)
def test_triton_experts_in_half_precision_are_as_near_to_float32_as_torchs(kernels, family):
    """In float16: the interpreter rounds float32 to bfloat16 toward zero, which no GPU does."""
    module, (hidden, ids, weights) = make(family), routed()
    wanted = tokens_with(module, "reference", hidden, ids, weights)
    half = module.to(torch.float16), hidden.half(), ids, weights
    got, torchs = (tokens_with(half[0], backend, *half[1:]) for backend in ("triton", "torch"))
    for name, value in wanted.items():
        assert got[name].dtype == torchs[name].dtype
        errors = [relative_error(found[name].float(), value) for found in (got, torchs)]
        assert errors[0] < 1.5 * errors[1] < 0.01, (name, errors)


def test_triton_experts_with_an_unknown_activation_run_it_in_torch(kernels):
    module = make("plain")
    module.act_fn = torch.nn.Tanh()
    assert kernels.TritonBackend().gate(module, torch.float32) is None
    assert_equal(tokens_with(module, "triton", *routed()), tokens_with(module, "reference", *routed()))


def test_triton_experts_with_adapters_equal_plain_operators(kernels):
    module, inputs = make("plain", adapters=True), routed()
    assert_equal(tokens_with(module, "triton", *inputs), tokens_with(module, "reference", *inputs))


def _equal_the_reference(folder, cases):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ids = token_batch(world)
    reference = reference_model(folder).train()
    token_loss(reference, ids).backward()
    wanted = dict(reference.named_parameters())
    for ep, backend, checkpointing in cases:
        model, _ = sharded_model(folder, world, ep, experts_backend=backend, checkpointing=checkpointing)
        model.train()
        token_loss(model, ids[2 * rank : 2 * rank + 2]).backward()
        for name, param in model.named_parameters():
            error = relative_error(param.grad.full_tensor(), wanted[name].grad)
            assert error < RELATIVE, (ep, backend, checkpointing, name, error)


def test_every_backend_on_two_ranks_has_the_gradients_of_the_plain_model(tmp_path):
    folder = save_qwen3_moe(
        tmp_path, hidden_size=24, moe_intermediate_size=20, num_experts=4, num_hidden_layers=2, mlp_only_layers=[]
    )
    cases = [(ep, backend, "none") for ep in (1, 2) for backend in ("reference", "torch", "triton")]
    run_ranks(_equal_the_reference, 2, folder, [*cases, (2, "triton", "full"), (1, "torch", "full")])
