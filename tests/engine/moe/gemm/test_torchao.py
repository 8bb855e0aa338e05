"""Experts whose products are torchao's in MXFP8: what torchao makes of each expert's rows, on any number of ranks."""

import copy
import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch import nn

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.moe.forward import ExpertsRuntime, attach, experts_forward
from epfsdp2.engine.moe.gemm.backends import choose_backend
from epfsdp2.engine.preflight.run import check_training
from tests.support.models.tiny import relative_error
from tests.support.moe.experts import FAMILIES, Config, E, assert_equal, grads_of, make, routed, rows_with, tokens_with
from tests.support.ranks import run_ranks
from tests.support.trainer.settings import checkpoint, engine

MXFP8 = "torchao:mxfp8"
WIDTH, INNER = 64, 96
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


class Wide(Config):
    hidden_size, intermediate_size, moe_intermediate_size = WIDTH, INNER, INNER


def _experts(family):
    return make(family, torch.bfloat16, config=Wide)


def _by_torchao(module, rows, counts_e, grad):
    """Output and gradients with a call of torchao's for each expert and linear."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common import KernelPreference

    module, rows = copy.deepcopy(module), rows.clone().requires_grad_()

    def linear(x, name, expert):
        weight = getattr(module, name)[expert : expert + 1]
        out_in = weight.transpose(-2, -1).contiguous() if module.is_transposed else weight
        offsets = torch.tensor([x.shape[0]], dtype=torch.int32)
        how = {"kernel_preference": KernelPreference.EMULATED, "pad_token_groups_for_grouped_mm": True}
        out = _to_mxfp8_then_scaled_grouped_mm(x, out_in.transpose(-2, -1), offsets, **how)
        bias = getattr(module, f"{name}_bias", None)
        return out if bias is None else out + bias[expert]

    parts = []
    for expert, x in enumerate(rows.split(counts_e.tolist())):
        if x.shape[0]:
            h = linear(x, "gate_up_proj" if module.has_gate else "up_proj", expert)
            parts.append(linear(module._apply_gate(h) if module.has_gate else module.act_fn(h), "down_proj", expert))
    out = torch.cat(parts)
    out.backward(grad.view_as(out).to(out.dtype))
    return {"out": out, "rows": rows.grad} | grads_of(module)


@needs_torchao
@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_those_of_torchao_for_each_expert(family):
    module, counts_e = _experts(family), torch.tensor([18, 0, 40, 0, 1, 3])
    rows = torch.randn(62, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    got = rows_with(module, MXFP8, rows, counts_e)
    grad = torch.linspace(-1, 1, got["out"].numel())
    assert_equal(got, _by_torchao(module, rows, counts_e, grad))
    assert not got["down_proj"][1].any()
    plain = rows_with(module, "reference", rows, counts_e)
    weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj", "rows", "out")
    assert all(relative_error(got[name].float(), plain[name].float()) > 1e-3 for name in weights)


@needs_torchao
def test_no_rows_give_dense_gradients_of_zero():
    module = _experts("plain")
    got = rows_with(module, MXFP8, torch.zeros(0, WIDTH, dtype=torch.bfloat16), torch.zeros(E, dtype=torch.int64))
    assert got["out"].shape == (0, WIDTH)
    assert all(got[name].shape == param.shape and not got[name].any() for name, param in module.named_parameters())


def _over_ranks():
    rank, group, module = dist.get_rank(), dist.group.WORLD, _experts("plain")
    hidden, ids, weights = routed(48, torch.bfloat16, width=WIDTH)
    expected = tokens_with(module, MXFP8, hidden, ids, weights)
    grad = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    own = copy.deepcopy(module)
    for name, param in module.named_parameters():
        setattr(own, name, nn.Parameter(param.detach().chunk(2)[rank].clone()))
    attach(own, ExpertsRuntime(E, group, backend=MXFP8))
    x, w = hidden.chunk(2)[rank].clone().requires_grad_(), weights.chunk(2)[rank].clone().requires_grad_()
    out = experts_forward(own, x, ids.chunk(2)[rank], w)
    (out.float() * grad.chunk(2)[rank]).sum().backward()
    got = {"out": out, "hidden": x.grad, "weights": w.grad} | grads_of(own)
    assert_equal(got, {name: value.chunk(2)[rank] for name, value in expected.items()})


@needs_torchao
def test_experts_over_two_ranks_compute_what_one_rank_does():
    run_ranks(_over_ranks, 2)


def test_what_torchao_cannot_do_is_refused(tmp_path, monkeypatch):
    with pytest.raises(
        SettingError, match="=torchao:fp8_rowwise: torchao emulates no rowwise products .*torchao:mxfp8"
    ):
        choose_backend("torchao:fp8_rowwise", "cpu", torch.bfloat16)
    with pytest.raises(SettingError, match="=torchao:int8: of torchao there is torchao:mxfp8"):
        choose_backend("torchao:int8", "cpu", torch.bfloat16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(SettingError, match="takes rows in bfloat16, and engine.dtype says torch.float32"):
        choose_backend(MXFP8, "cpu", torch.float32)
    assert "emulates it on a CPU" in choose_backend(MXFP8, "cpu", torch.bfloat16).line
    assert choose_backend(MXFP8, "cuda", torch.bfloat16).line is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(SettingError, match="need a GPU of compute capability 10, and this is cuda 9.0"):
        choose_backend(MXFP8, "cuda", torch.bfloat16)
    model = checkpoint(tmp_path)  # whose experts have 16 inner columns
    with pytest.raises(SettingError, match="32 values share a scale, and a rank of .* has 16 of "):
        check_training(engine(experts_backend=MXFP8), 2, model, device="cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="torchao is not installed. What works: pip install torchao"):
        choose_backend(MXFP8, "cpu", torch.bfloat16)
