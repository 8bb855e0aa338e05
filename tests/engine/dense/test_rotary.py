"""Fused rotary embeddings: the bits of transformers' own, forward and backward, in Triton's interpreter."""

import importlib.util
import sys
from unittest import mock

import pytest
import torch
import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from epfsdp2.engine.dense import fuse, rotary
from epfsdp2.engine.dense.rotary import FusedRotary, fuse_rotary
from tests.parity.families import FAMILIES
from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe, token_batch, token_loss
from tests.support.moe.interpreter import compiled_passes, drawn, interpreted_kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# Complex numbers, one tensor at a time, cosines of half the columns, or pairs that stay neighbours.
OWN = (
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v4",
    "ernie4_5_moe",
    "ernie4_5_vl_moe",
    "gemma4",
    "glm_moe_dsa",
    "gpt_oss",
)
OWN += ("llama4", "openai_privacy_filter")
HALVES, PARTS = modeling_qwen3_moe.apply_rotary_pos_emb, modeling_glm4_moe.apply_rotary_pos_emb
NEIGHBOURS = modeling_deepseek_v3.apply_rotary_pos_emb_interleave


@pytest.fixture(scope="module")
def kernels():
    with interpreted_kernels("epfsdp2.engine.dense.triton_rotary") as found:
        yield found


@pytest.fixture
def on_cpu(kernels, monkeypatch):
    monkeypatch.setattr(FusedRotary.__init__, "__defaults__", ("cpu",))
    monkeypatch.setattr(kernels, "_HEADS", 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("plain", "part"), [(HALVES, 24), (PARTS, 24), (PARTS, 12), (NEIGHBOURS, 24)])
def test_fused_rotary_has_the_bits_of_transformers_own(on_cpu, plain, part, dtype, batch):
    fused = rotary._fused(plain)
    cos, sin = (drawn(batch, 5, part, seed=seed, dtype=dtype) for seed in (2, 3))  # whose halves differ
    # Queries are a view with heads inside of tokens, as projections make them; keys are a part of wider rows.
    q, k = drawn(2, 5, 3, 24, dtype=dtype).transpose(1, 2), drawn(2, 1, 5, 40, dtype=dtype, seed=1)[..., 8:32]
    found = {}
    for function in (plain, fused):
        leaves = [x.detach().requires_grad_() for x in (q, k)]
        out = function(*leaves, cos, sin)
        grads = [drawn(*y.shape, dtype=dtype, seed=4) for y in out]
        found[function] = [*out, *torch.autograd.grad(out, leaves, grads)]
    with mock.patch.object(FusedRotary, "plain", side_effect=AssertionError, create=True):
        assert all(torch.equal(ours, wanted) for ours, wanted in zip(found[fused], found[plain], strict=True))


def test_functions_are_found_by_how_they_rotate():
    assert (rotary._fused(HALVES).is_interleaved, rotary._fused(HALVES).takes_parts) == (False, False)
    assert (rotary._fused(PARTS).is_interleaved, rotary._fused(PARTS).takes_parts) == (False, True)
    assert (rotary._fused(NEIGHBOURS).is_interleaved, rotary._fused(NEIGHBOURS).takes_parts) == (True, False)
    assert rotary._fused(modeling_gpt_oss.apply_rotary_pos_emb) is None  # its cosines are of half the columns


def test_what_the_kernel_does_not_take_runs_as_it_was(on_cpu):
    plain = mock.Mock(side_effect=HALVES)
    fused = FusedRotary(plain, False, False)
    q, k, cos, sin = drawn(1, 2, 3, 8), drawn(1, 1, 3, 8), drawn(1, 3, 8), drawn(1, 3, 8)
    fused(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    fused(q, k, cos[0][None, None], sin[0][None, None], 0)
    fused(q.bfloat16(), k.bfloat16(), cos, sin)
    assert plain.call_count == 3
    fused(q, k, cos, sin)
    assert plain.call_count == 3


@pytest.fixture
def restored():
    """Set back what ``fuse_rotary`` replaces."""
    yield
    for file in list(sys.modules.values()):
        for name in rotary._NAMES:
            if isinstance(found := vars(file).get(name) if hasattr(file, "__dict__") else None, FusedRotary):
                setattr(file, name, found.plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_of_every_family_calls_the_fused_rotary_or_has_its_own(restored, name):
    family = FAMILIES[name]
    with torch.device("meta"):
        model = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.sizes))
    found = fuse_rotary(model)
    assert fuse_rotary(model) == found
    assert any(found.values()) == (name not in OWN), name


def test_model_with_fused_rotary_has_its_loss_and_gradients(on_cpu, restored, tmp_path):
    folder = save_qwen3_moe(tmp_path)
    plain, fused = reference_model(folder), reference_model(folder)
    losses = [token_loss(plain, token_batch(2))]
    assert fuse_rotary(fused) == {f"{modeling_qwen3_moe.__name__}.apply_rotary_pos_emb": True}
    with mock.patch.object(rotary._Rotated, "apply", wraps=rotary._Rotated.apply) as applied:
        losses.append(token_loss(fused, token_batch(2)))
    assert applied.call_count == 2 * fused.config.num_hidden_layers
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    # Gradients of the projections have another layout, and so their products another order.
    for ours, wanted in zip(fused.parameters(), plain.parameters(), strict=True):
        assert relative_error(ours.grad, wanted.grad) < 1e-6


@pytest.mark.parametrize(("name", "own"), [("qwen3_moe", ""), ("gpt_oss", "modeling_gpt_oss.apply_rotary_pos_emb")])
def test_log_names_what_is_fused_and_what_rotates_in_its_own_way(restored, caplog, name, own):
    family = FAMILIES[name]
    with torch.device("meta"):
        model = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.sizes))
    with mock.patch.object(fuse.dist, "get_rank", return_value=0), caplog.at_level("INFO", "epfsdp2"):
        fuse.fuse_dense(model)
    fused, *left = [record.getMessage() for record in caplog.records if record.name == "epfsdp2"]
    assert "RMSNorm" in fused and ("apply_rotary_pos_emb" in fused) == (not own)
    assert [line.endswith(own) for line in left] == ([True] if own else [])


def test_kernel_of_rotary_compiles_for_gpus_without_spills():
    rows = compiled_passes("rotary")
    assert {row["arch"] for row in rows} == {80, 90, 100}
    assert all(row["stack"] == 0 and row["ctas"] * row["warps"] >= 16 for row in rows), rows
