"""Fused RMSNorms: found on random inputs, equal to the family's own in Triton's interpreter, and compiled."""

import importlib.util
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from epfsdp2.engine.dense.norms import RmsNorm, fuse_norms, rms_norm_of
from epfsdp2.engine.wrap_forward import wrapped_by
from tests.parity.families import FAMILIES
from tests.support.models.tiny import relative_error
from tests.support.moe.interpreter import compiled_passes, drawn, interpreted_kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# Norms that are no RMSNorms, or have a gate.
OTHERS = ("LayerNorm", "Unweighted", "L2Norm", "NormGated", "NormAttentionNorm")


@pytest.fixture(scope="module")
def kernels():
    with interpreted_kernels("epfsdp2.engine.dense.triton_norms") as found:
        yield found


@pytest.mark.parametrize(
    ("norm", "width"), [(RmsNorm(1e-6, 0.0, True), 16), (RmsNorm(1e-5, 1.0, False), 40)], ids=["rounds first", "offset"]
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)])
def test_fused_norm_has_the_values_and_gradients_of_the_plain_one(kernels, monkeypatch, norm, dtype, bound, width):
    monkeypatch.setattr(kernels, "_VALUES", 64)
    monkeypatch.setattr(kernels, "_PROGRAMS", 3)
    x, weight, grad = drawn(7, 3, width, dtype=dtype), drawn(width, dtype=dtype, seed=1), drawn(7, 3, width, seed=2)
    found = {}
    for side in (norm.fused, norm.plain):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        out = side(*leaves)
        out.backward(grad.to(dtype))
        found[side] = out.detach(), *(leaf.grad for leaf in leaves)
    for ours, wanted in zip(*found.values(), strict=True):
        assert ours.dtype == wanted.dtype == dtype and relative_error(ours, wanted) < bound
    rows, few = norm.fused(x, weight), norm.fused(x[:1, :2], weight)
    assert torch.equal(rows[:1, :2], few)  # a row does not depend on the others


def test_fused_norm_reads_rows_that_are_parts_of_wider_ones(kernels):
    norm, whole, weight = RmsNorm(1e-6), drawn(4, 3, 40), drawn(16, seed=1)
    for x in (whole[..., 8:24], whole.transpose(0, 1)[..., :16], whole[:0, :, :16]):
        x = x.detach().requires_grad_()
        out = norm.fused(x, weight)
        torch.testing.assert_close(out, norm.plain(x, weight))
        out.sum().backward()
        wanted = torch.autograd.grad(norm.plain(x, weight).sum(), x)[0]
        torch.testing.assert_close(x.grad, wanted, atol=1e-5, rtol=1e-5)


def test_norms_of_a_family_are_found_with_their_offset_and_rounding():
    assert rms_norm_of(Qwen3NextRMSNorm(64)) == RmsNorm(1e-6, 1.0, False)
    with torch.device("meta"):
        assert rms_norm_of(Qwen3MoeRMSNorm(64, eps=1e-5)) == RmsNorm(1e-5, 0.0, True)
    for other in (nn.LayerNorm(64), nn.Linear(8, 8), Llama4TextL2Norm(), Qwen3NextRMSNormGated(64)):
        assert rms_norm_of(other) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_its_rms_norms_fused(name):
    with torch.device("meta"):
        model = FAMILIES[name].build()
    fuse_norms(model)
    for module in model.modules():
        kind, is_fused = type(module).__name__, "norm" in wrapped_by(module)
        is_norm = "Norm" in kind and next(module.parameters(recurse=False), None) is not None
        is_other = kind != "GraniteMoeHybridRMSNormGated" and any(other in kind for other in OTHERS)
        assert is_fused == (is_norm and not is_other), kind


def test_norm_that_is_called_with_a_gate_or_another_dtype_runs_as_it_was(monkeypatch):
    module = Qwen3MoeRMSNorm(16)
    assert fuse_norms(module) == {"Qwen3MoeRMSNorm": 1}
    monkeypatch.setattr(RmsNorm, "fused", mock.Mock(side_effect=AssertionError))
    x = drawn(2, 16, dtype=torch.bfloat16)
    assert torch.equal(module(x), type(module).forward(module, x))
    with pytest.raises(AssertionError):
        module(x.float())


@pytest.mark.long
@pytest.mark.parametrize("arch", (80, 90, 100))
def test_kernels_of_norms_compile_for_gpus_without_spills(arch):
    rows = compiled_passes("norms", str(arch))
    assert {(row["kernel"], row["arch"]) for row in rows} == {("norm_rows", arch), ("norm_rows_backward", arch)}
    assert all(row["stack"] == 0 and row["ctas"] * row["warps"] >= 16 for row in rows), rows
