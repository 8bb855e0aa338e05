"""The fused experts equal autograd through plain operators, and save less for backward."""

import copy
import importlib.util
import itertools
from functools import partial
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from epfsdp2.engine.compat.torch_sms import sms_left
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.moe import forward
from epfsdp2.engine.moe.forward import ExpertsRuntime, attach, experts_forward, linears
from epfsdp2.engine.moe.fused import Experts, on_rows
from epfsdp2.engine.moe.gemm import backends
from epfsdp2.engine.moe.gemm.backends import Backend, BackendChoice, Groups, choose_backend
from epfsdp2.engine.moe.gemm.gate import gate_of
from tests.support.engine.sharded import sharded_model, whole_gradients
from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe, token_batch, token_loss
from tests.support.moe.experts import (
    ENDS,
    FAMILIES,
    RELATIVE,
    D,
    E,
    T,
    assert_equal,
    bytes_kept,
    grads_of,
    make,
    routed,
    rows_with,
    tokens_with,
)
from tests.support.moe.indexed_backend import IndexedBackend
from tests.support.moe.interpreter import drawn
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(("family", "tokens"), itertools.product(FAMILIES, (T, 0)))
def test_fused_experts_of_every_layout_equal_plain_operators(family, tokens):
    module, (hidden, ids, weights) = make(family), routed(tokens)
    got = tokens_with(module, "torch", hidden, ids, weights)
    assert_equal(got, tokens_with(module, "reference", hidden, ids, weights))
    assert not got["down_proj"][-1].any() and (tokens == 0 or got["down_proj"][0].any())
    counts_e = torch.tensor([3, 0, 4, 0, 1, 3]) * (tokens > 0)
    rows = torch.randn(int(counts_e.sum()), D)
    for scale in (None, torch.rand(len(rows))):
        got, want = (rows_with(module, backend, rows, counts_e, scale) for backend in ("torch", "reference"))
        assert_equal(got, want)


def _users_own(self, hidden_states, top_k_index, top_k_weights):
    """Loop over experts, like models outside of transformers."""
    out = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):
        token, slot = (top_k_index == expert).nonzero(as_tuple=True)
        up = hidden_states[token] @ self.gate_up_proj[expert].T
        down = self._apply_gate(up) @ self.down_proj[expert].T
        out = out.index_add(0, token, down * top_k_weights[token, slot, None])
    return out


ALL_EXPERTS_FUNCTIONS.register("a_users_own", _users_own)


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", "a_users_own"])
def test_registered_experts_functions_equal_plain_operators(name):
    for family, tokens in itertools.product(["plain"] if name == "a_users_own" else FAMILIES, (T, 0)):
        module, given = make(family), routed(tokens)
        assert_equal(tokens_with(module, f"transformers:{name}", *given), tokens_with(module, "reference", *given))


@pytest.mark.parametrize("frozen", [(), ("gate_up_proj", "down_proj"), ENDS, ENDS[:2] + ("gate_up_proj",)], ids=str)
def test_fused_experts_with_adapters_and_frozen_weights_equal_plain_operators(frozen):
    module, inputs = make("plain", adapters=True), routed()
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    got = tokens_with(module, "torch", *inputs)
    assert_equal(got, tokens_with(module, "reference", *inputs))
    assert len(got) == 3 + 6 - len(frozen)
    module._epfsdp2_adapters["down_proj"][0].enabled = False
    for name in ENDS:
        module.get_parameter(name).requires_grad_(False)
    assert_equal(tokens_with(module, "torch", *inputs), tokens_with(module, "reference", *inputs))


@pytest.mark.parametrize(
    ("family", "weights_dtype"), [("plain", torch.float32), ("interleaved, transposed, biases", torch.bfloat16)]
)
def test_fused_experts_in_bfloat16_are_no_further_from_float32_than_plain_operators(family, weights_dtype):
    module, (hidden, ids, weights) = make(family, torch.bfloat16), routed(400, torch.bfloat16, weights_dtype)
    exact = tokens_with(copy.deepcopy(module).float(), "reference", hidden.float(), ids, weights.float())
    got, plain = (tokens_with(module, backend, hidden, ids, weights) for backend in ("torch", "reference"))
    for name, value in exact.items():
        ours, theirs = (relative_error(of[name].float(), value) for of in (got, plain))
        assert 0 < ours < 1.1 * theirs, (name, ours, theirs)
        assert got[name].dtype == plain[name].dtype


def test_fused_experts_under_autocast_recompute_the_activation_under_it():
    def product(pre):
        """Compute no known gate, and a product, which autocast computes in bfloat16."""
        seen.append(torch.is_autocast_enabled("cpu"))
        gate, up = pre.chunk(2, dim=-1)
        return (gate.tanh() * up) @ torch.eye(gate.shape[-1], dtype=pre.dtype)

    seen, results, (hidden, ids, weights) = [], [], routed()
    for backend in ("torch", "reference"):
        module = make("plain")
        module._apply_gate = product
        assert gate_of(module) is None
        seen.clear()
        attach(module, ExpertsRuntime(E, None, backend=backend))
        leaf = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = experts_forward(module, leaf, ids, weights)
        out.sum().backward()
        results.append({"out": out, "hidden": leaf.grad} | grads_of(module))
        assert seen == [True] * (2 if backend == "torch" else 1)
    assert_equal(*results)


def test_fused_experts_on_one_rank_save_less_than_0_4_of_grouped_mm():
    """Proportions of Qwen3-30B-A3B: a quarter of the width and of the experts."""
    dtype, experts, hidden, inner = torch.bfloat16, 32, 512, 192
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": experts}
    module = make("plain", dtype, config=partial(Qwen3MoeConfig, **sizes, num_experts_per_tok=8))
    attach(module, ExpertsRuntime(experts, None))
    weights, ids = torch.randn(64, experts).softmax(-1).topk(8)
    given = torch.randn(64, hidden, dtype=dtype, requires_grad=True), ids, weights.to(dtype).requires_grad_()
    theirs, ours = (
        bytes_kept(lambda f=f: f(module, *given), [*given, *module.parameters()])
        for f in (grouped_mm_experts_forward, experts_forward)
    )
    pre = 64 * 8 * 2 * inner * dtype.itemsize
    assert pre <= ours <= pre + 64 * 8 * 8 <= 0.4 * theirs


def test_fused_experts_backward_runs_twice_and_its_first_linear_not_alone():
    module, (hidden, ids, weights) = make("plain"), routed()
    attach(module, ExpertsRuntime(E, None))
    out = experts_forward(module, hidden.requires_grad_(), ids, weights)
    first, second = (torch.autograd.grad(out.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.abs().sum() > 0
    between = out.grad_fn.up.saved_tensors[0]
    with pytest.raises(AssertionError, match="ran before that of their second, whose results it needs"):
        between.sum().backward()


def test_fused_experts_when_recomputed_stop_before_the_down_projection():
    """Forward runs 2 grouped GEMMs, recomputation the first one, backward one for each."""
    module, (hidden, ids, weights) = make("plain"), routed()
    attach(module, ExpertsRuntime(E, None))
    hidden.requires_grad_()
    with mock.patch.object(Backend, "mm", autospec=True, side_effect=Backend.mm) as product:
        out = checkpoint(experts_forward, module, hidden, ids, weights, use_reentrant=False)
        assert product.call_count == 2
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        assert product.call_count == 5
    want = tokens_with(module, "reference", hidden.detach(), ids, weights)
    assert_equal({"out": out, "hidden": hidden.grad} | grads_of(module), {k: want[k] for k in want if k != "weights"})


def test_choose_backend_that_can_not_run_is_refused_by_name_and_skipped_by_auto(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for dtype, reason in ((torch.float32, "Triton needs a GPU"), (torch.float64, "bfloat16 and float16, not in")):
        with pytest.raises(SettingError, match=rf"experts_backend=triton: .*{reason}.*What works: .*=torch"):
            choose_backend("triton", "cpu", dtype)
        choice = choose_backend("auto", "cpu", dtype)
        assert choice.name == "torch" and reason in choice.line
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", "cpu", torch.float32).name == "triton"
    assert choose_backend("auto", "cpu", torch.float32) == BackendChoice("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, auto in (((7, 5), "torch"), ((8, 0), "triton"), ((9, 0), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        choice = choose_backend("auto", "cuda", torch.bfloat16)
        assert choice.name == auto and (choice.line is None) == (auto == "triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (13, 0))  # unknown
    for wanted in ("auto", "triton"):
        choice = choose_backend(wanted, "cuda", torch.bfloat16)
        assert choice.name == "triton" and "and this GPU has 13.0" in choice.line
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(SettingError, match=r"compute capability 8.0, and this GPU has 7.5"):
        choose_backend("triton", "cuda", torch.bfloat16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="Triton is not installed"):
        choose_backend("triton", "cuda", torch.bfloat16)


def test_choose_backend_with_an_unknown_name_is_refused():
    with pytest.raises(SettingError, match=r"engine.experts_backend=cutlass: is auto, torch, .* or transformers:NAME"):
        choose_backend("cutlass", "cpu", torch.float32)
    for name in ("cutlass", "epfsdp2"):
        with pytest.raises(SettingError, match=rf"=transformers:{name}: names no function .* has .*grouped_mm"):
            choose_backend(f"transformers:{name}", "cpu", torch.float32)


@pytest.mark.parametrize("family", ["plain", "interleaved, transposed, biases"])
def test_fused_experts_of_rows_in_the_order_received_equal_those_of_grouped_rows(family):
    """Operators read rows through an index and store them in an order."""
    module, counts_e = make(family), torch.tensor([18, 0, 4, 0, 1, 3])
    total = int(counts_e.sum())
    drawn = torch.Generator().manual_seed(0)
    rows, order = torch.randn(total, D, generator=drawn), torch.randperm(total, generator=drawn)
    scale, grad = torch.rand(total, generator=drawn), torch.randn(total, D, generator=drawn)
    experts = Experts(module, IndexedBackend(), *linears(module, dict(module.named_parameters(recurse=False))))
    found = []
    for order_R in (None, order):
        x, by = rows.clone().requires_grad_(), scale.clone().requires_grad_()
        given = (x[order], by[order]) if order_R is None else (x, by)
        out = on_rows(experts, given[0], counts_e, given[1], order_R)
        out.backward(grad[order] if order_R is None else grad)
        out = out.detach() if order_R is not None else torch.empty_like(out).index_copy_(0, order, out.detach())
        found.append([out, x.grad, by.grad, *(param.grad.clone() for param in module.parameters())])
        module.zero_grad()
    assert all(relative_error(one, other) < RELATIVE for one, other in zip(*found, strict=True))


def test_experts_forward_calls_no_function_mode():
    """Modes that override the router's choice would run at each of its calls."""

    class Refused(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    module, given = make("plain"), routed()
    attach(module, ExpertsRuntime(E, None))
    with Refused():
        experts_forward(module, *given)


def test_torch_outer_of_experts_without_rows_is_zero_where_the_kernel_leaves_garbage(monkeypatch):
    """CUTLASS on compute capability 10.x (pytorch#172439)."""
    groups, rows = Groups(torch.tensor([21, 0, 3, 17, 0]), 41), drawn(41, 16)
    want = Backend().outer(rows, rows, groups)
    grouped_mm, calls = backends.torch_grouped_mm, []

    def leaves_garbage(a, b, offs):
        calls.append(offs)
        empty = (groups.counts_e == 0)[:, None, None]
        return grouped_mm(a, b, offs=offs).masked_fill(empty, float("nan"))

    for place in (backends, forward):
        monkeypatch.setattr(place, "torch_grouped_mm", leaves_garbage)
    monkeypatch.setattr(backends, "_on_cpu", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert relative_error(Backend().outer(rows, rows, groups), want) < 1e-6 and len(calls) == 1
    weight = drawn(5, 16, 16).requires_grad_()
    forward.grouped_linear(rows, weight, groups.counts_e, None, False).sum().backward()
    assert len(calls) == 1, "autograd would compute the weight's gradient with it"


def _equal_the_reference(folder, cases):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ids = token_batch(world)
    reference = reference_model(folder).train()
    token_loss(reference, ids).backward()
    wanted = dict(reference.named_parameters())
    for ep, backend, checkpointing in cases:
        options = {"experts_backend": backend, "checkpointing": checkpointing, "communication_sms": 20 + ep}
        model, _ = sharded_model(folder, world, ep, **options)
        assert sms_left() == 20 + ep
        model.train()
        token_loss(model, ids[2 * rank : 2 * rank + 2]).backward()
        for name, grad in whole_gradients(model).items():
            error = relative_error(grad, wanted[name].grad)
            assert error < RELATIVE, (ep, backend, checkpointing, name, error)


def test_experts_with_every_backend_on_two_ranks_have_the_gradients_of_the_plain_model(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    folder = save_qwen3_moe(
        tmp_path, hidden_size=24, moe_intermediate_size=20, num_experts=4, num_hidden_layers=1, mlp_only_layers=[]
    )
    cases = [(2, "reference", "none"), (1, "triton", "none"), (2, "triton", "full"), (1, "torch", "full")]
    run_ranks(_equal_the_reference, 2, folder, cases)
