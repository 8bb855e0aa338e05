"""The loader inside SGLang's workers, on a model that needs no SGLang; ``test_sglang.py`` has real ones."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from epfsdp2.rollout.layout.layout_check import RANK, entry, rank_entry
from epfsdp2.rollout.layout.slice_names import slice_name
from epfsdp2.rollout.layout.specs import Rollout
from epfsdp2.rollout.sglang import loader
from epfsdp2.rollout.sglang.bucket import ANSWER_BYTES, Header, answer_of, fill
from epfsdp2.rollout.transport.checksums import with_checksums

RANK_ENTRY = rank_entry(0, Rollout())


class Model(nn.Module):
    """Two parameters, and a tensor computed from one of them."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Module()
        self.attention.fused_qkv_a_proj_with_mqa = nn.Linear(3, 5, bias=False)
        self.bias = nn.Parameter(torch.zeros(4))
        self.twice = torch.zeros(4)

    def post_load_weights(self):
        self.twice = 2 * self.bias.detach()


FUSED = "attention.fused_qkv_a_proj_with_mqa.weight"
LAYOUT = {RANK: RANK_ENTRY, FUSED: entry((5, 3)), "bias": entry((4,))}


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(loader, "rank_of", lambda: (0, RANK_ENTRY))
    monkeypatch.setattr(loader, "changed_layout", lambda model: "")
    return Model()


def _send(model, tensors, *, verify=True, layout=LAYOUT, bucket=64):
    """Load tensors in buckets of so many bytes; return the first answer that is not empty."""

    def allocate(nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    stream = (pair for pair in tensors)
    buckets = fill(with_checksums(stream) if verify else stream, [allocate(ANSWER_BYTES + bucket)] * 2, allocate)
    answers = []
    for index, (header, memory) in enumerate(buckets):
        if index == 0:
            header.layouts, header.verify = layout and [layout], verify
        loader.load(model, [(header.as_text(), memory)])
        answers.append(answer_of(memory))
    assert len(answers) > 1
    return next((answer for answer in answers if answer), "")


def _units(bias=1.0):
    values = torch.arange(15.0).view(5, 3)
    yield slice_name(FUSED, 0, 2), values[::2]
    yield slice_name(FUSED, 1, 2), values[1::2]
    yield slice_name("bias"), torch.full((4,), bias)


def test_sglang_loader_of_units_stores_them_by_name_and_recomputes_what_follows(model):
    assert _send(model, _units()) == ""
    assert torch.equal(model.get_parameter(FUSED), torch.arange(15.0).view(5, 3))
    assert torch.equal(model.twice, 2 * torch.ones(4))
    assert _send(model, _units(0.0)) == ""
    assert torch.equal(model.bias, torch.zeros(4)) and torch.equal(model.twice, torch.zeros(4))


@pytest.mark.parametrize("shape", [(5, 2), (5,), (6, 3)])
def test_sglang_loader_refuses_units_that_do_not_fit(model, shape):
    answer = _send(model, [(slice_name(FUSED), torch.ones(shape)), *list(_units())[2:]], bucket=32)
    assert f"{slice_name(FUSED)} {list(shape)} was sent, which does not fit into [5, 3] on this worker" in answer


def test_sglang_loader_refuses_the_names_of_checkpoints(model):
    answer = _send(model, [*_units(), ("bias", torch.ones(4))])
    assert "bias is not the name of a worker's parameter" in answer


@pytest.mark.parametrize("verify", [True, False])
def test_sglang_loader_reports_a_parameter_that_did_not_come(model, verify):
    answer = _send(model, list(_units())[:2], verify=verify, bucket=32)
    assert "1 parameters of SGLang's model did not receive every element, first bias (0 of 4)" in answer


def test_sglang_loader_of_a_model_with_another_layout_is_refused(model, monkeypatch):
    assert "first bias: planned is [4] from 0" not in _send(model, _units())
    answer = _send(model, _units(), layout={**LAYOUT, "bias": entry((5,))})
    assert "bias: planned is [5] from 0, actual is [4] from 0" in answer and "rollout_sync=full works" in answer
    monkeypatch.setattr(loader, "changed_layout", lambda model: "experts runs on another kernel")
    assert "worker 0 of a replica: experts runs on another kernel" in _send(model, _units())


def test_sglang_loader_compares_layouts_in_the_sync_that_has_them(model, monkeypatch):
    monkeypatch.setattr(loader, "changed_layout", lambda model: "experts runs on another kernel")
    assert "another kernel" in _send(model, _units())
    assert _send(model, _units(), layout=None) == ""


def test_sglang_loader_compares_layouts_of_a_bucket_without_tensors(model):
    answers = []
    for size in (4, 5):
        memory = torch.zeros(ANSWER_BYTES, dtype=torch.uint8)
        header = Header(layouts=[{**LAYOUT, "bias": entry((size,))}])
        loader.load(model, [(header.as_text(), memory)])
        answers.append(answer_of(memory))
    assert answers[0] == "" and "planned is [5] from 0, actual is [4] from 0" in answers[1]


def test_sglang_loader_names_kernels_that_store_weights_otherwise(monkeypatch):
    class Plain:
        use_triton_kernels = use_flashinfer_cutlass = use_flashinfer_trtllm_moe = False

    unquant = ModuleType("unquant")
    for name in ("UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod", "UnquantizedLinearMethod"):
        setattr(unquant, name, Plain)
    quantization = SimpleNamespace(unquant=unquant)
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    monkeypatch.setitem(sys.modules, "sglang.srt", ModuleType("sglang.srt"))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers", ModuleType("sglang.srt.layers"))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.quantization", quantization)
    model = Model()
    assert loader.changed_layout(model) == ""
    model.attention.quant_method = Plain()
    assert loader.changed_layout(model) == ""
    model.attention.use_intel_amx_backend = True
    assert loader.changed_layout(model) == "attention is packed for AMX"
    model.attention.use_intel_amx_backend = False
    model.attention.quant_method.use_flashinfer_cutlass = True
    assert "flashinfer_cutlass (up projections come first)" in loader.changed_layout(model)
    model.attention.quant_method = Plain()
    model.attention.quant_method.w13_swiglu_interleaved = True
    assert "in turn; set SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED=0" in loader.changed_layout(model)
    model.attention.quant_method = object()
    assert loader.changed_layout(model) == "attention is quantised by object"
