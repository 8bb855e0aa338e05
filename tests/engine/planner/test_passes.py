"""Bytes that the operators of a layer read and write, and what a fused one saves, beside real layers on a CPU."""

import contextlib
import importlib.util
import sys
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe

from epfsdp2.engine.dense import rotary
from epfsdp2.engine.dense.norms import fuse_norms
from epfsdp2.engine.dense.rotary import FusedRotary
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.moe.find import UnsupportedModelError
from epfsdp2.engine.planner.activations import CountedPasses, backward_of, trace
from tests.parity.families import ALL, CHOOSING
from tests.support.moe.interpreter import interpreted_kernels

# The last two choose keys by torch.nonzero, which has no shape on meta.
KINDS = ["qwen3_moe", "qwen3_next", "gemma4", *sorted({*CHOOSING} & {*ALL} - {"glm5_next", "qwen4_exp"})]
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
SIZES = {
    **{"hidden_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "num_experts": 8},
    **{"num_experts_per_tok": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
}


def _layer(dtype, fuse_dense):
    model = build_on_meta(AutoModelForCausalLM, Qwen3MoeConfig(**SIZES), dtype)
    return next(iter(trace(model, recompute_activations=True, fuse_dense=fuse_dense).layers.values()))


def test_passes_of_fused_norms_and_rotary_are_those_of_their_kernels():
    layer = _layer(torch.bfloat16, True)
    hidden, heads = 256, (8 + 2) * 32
    # Two norms of hidden states, those of heads, and their rotation; two residuals, which read two tensors.
    forward = 2 * (2 * 2 * hidden + 2 * heads + 2 * heads + 2 * 3 * hidden)
    assert forward < layer.passes < 1.05 * forward  # and the router's
    # Norms read a gradient too. A residual's gradient is added, and so are those by q, k and v, and by the router.
    backward = 2 * (2 * 3 * hidden + 3 * heads + 2 * heads + (2 + 2 + 1) * 3 * hidden)
    assert backward < layer.passes_backward < 1.05 * backward
    eager = _layer(torch.bfloat16, False)
    assert eager.passes > 4 * layer.passes and eager.passes_backward > 5 * layer.passes_backward


def test_operators_move_what_they_read_and_write_and_views_and_products_nothing():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with CountedPasses() as counted:
        y = (x @ weight).view(2, 2, 8).transpose(0, 1)
        assert counted.nbytes == 0
        torch.empty_like(x).copy_(x)
        assert counted.nbytes == 3 * 128  # one in place reads what it returns
        out = y + torch.ones(()).expand(2, 2, 8)
    assert counted.nbytes == 3 * 128 + 2 * 128 + 2 * 4
    with CountedPasses() as backward:
        backward_of((out, None), [x, weight])
    assert backward.nbytes == 0 and x.grad is None  # products and views alone


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=NEEDS_TRITON)])
def test_trace_counts_what_a_real_forward_saves(monkeypatch, fused):
    """Count bytes outside of the experts, for 24 tokens on a CPU with sdpa and Triton's interpreter."""
    traced = _layer(torch.float32, fused)
    config = Qwen3MoeConfig(**SIZES, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    kept, inside = {}, []
    target = model.model.layers[0]
    if fused:
        fuse_norms(target)
        monkeypatch.setattr(FusedRotary.__init__, "__defaults__", ("cpu",))
        name = "apply_rotary_pos_emb"
        monkeypatch.setattr(modeling_qwen3_moe, name, rotary._fused(getattr(modeling_qwen3_moe, name)))
    target.mlp.experts.register_forward_pre_hook(lambda *_: inside.append(1))
    target.mlp.experts.register_forward_hook(lambda *_: inside.pop() and None)
    hidden = torch.randn(1, 24, 256, requires_grad=True)
    positions = model.model.rotary_emb(hidden, torch.arange(24)[None])
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *positions)}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if not inside and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with contextlib.ExitStack() as kernels, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for part in ("norms", "rotary") if fused else ():
            kernels.enter_context(interpreted_kernels(f"epfsdp2.engine.dense.triton_{part}"))
        out = target(hidden, position_embeddings=positions, attention_mask=None)
    del out
    assert traced.dense * 24 == sum(kept.values())
    assert traced.input == 256 * 4 < traced.selective < traced.dense
    assert not fused or traced.dense < 0.8 * _layer(torch.float32, False).dense


@pytest.mark.parametrize("name", KINDS)
def test_backward_of_layers_of_every_kind_runs_on_meta_and_functions_are_set_back(name):
    model = ALL[name].build(ALL[name].attention).to("meta")
    file = sys.modules[type(model).__module__]
    before = vars(file).copy()
    for layer in trace(model.bfloat16(), fuse_dense=True).layers.values():
        assert layer.passes > 0 and layer.passes_backward > 0
    assert vars(file) == before


def test_layer_that_fails_on_meta_leaves_nothing_counting():
    model = build_on_meta(AutoModelForCausalLM, Qwen3MoeConfig(**SIZES), torch.float32)
    model.model.layers[0].self_attn.forward = mock.Mock(side_effect=RuntimeError("reads values"))
    with pytest.raises(UnsupportedModelError, match="reads values"):
        trace(model)
    assert not [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, CountedPasses)]
