"""Fused rotary embeddings have the bits of transformers' own in Triton's interpreter."""

import importlib
import importlib.util
import sys
from unittest import mock

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.qwen3_moe import modeling_qwen3_moe

from epfsdp2.engine.dense import rotary
from epfsdp2.engine.dense.norms import fuse_norms
from epfsdp2.engine.dense.rotary import FusedRotary, Rotation, fuse_rotary
from tests.parity.families import FAMILIES
from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe, token_batch, token_loss
from tests.support.moe.interpreter import compiled_passes, drawn, interpreted_kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

HALVES = modeling_qwen3_moe.apply_rotary_pos_emb
# Families -> batch and width of their tables for heads of 24 columns, and the rotation. The first have exact gradients.
EXACT = {
    "qwen3_moe": (1, 24, Rotation()),
    "glm4_moe": (2, 24, Rotation()),
    "glm4_moe parts": (1, 12, Rotation()),
    "deepseek_v3": (2, 24, Rotation(reads_neighbours=True)),
}
FUNCTIONS = EXACT | {
    "gpt_oss": (2, 12, Rotation(table="one")),
    "openai_privacy_filter": (2, 12, Rotation(True, True, "one")),
    "cohere2_moe": (2, 24, Rotation(True, True, "neighbours", rounds_last=True)),
    "ernie4_5_moe": (2, 24, Rotation(True, True, "first half", rounds_last=True)),
    "ernie4_5_vl_moe": (2, 24, Rotation(True, True, "neighbours", rounds_last=True)),
    "glm_moe_dsa": (2, 24, Rotation()),
    "gemma4": (2, 24, Rotation()),
    "deepseek_v4": (2, 8, Rotation(True, True, "one", rounds_last=True, is_last=True)),
    "deepseek_v2": (2, 12, Rotation(True, True, "one", rounds_last=True)),
    "llama4": (2, 12, Rotation(True, True, "one", rounds_last=True)),
}
# Their functions changed in transformers 5.19 at the latest.
FIRST_HALF = Rotation(reads_neighbours=True, table="first half")
if Version(transformers.__version__) >= Version("5.19"):
    FUNCTIONS |= {"deepseek_v3": (2, 24, FIRST_HALF), "glm_moe_dsa": (2, 24, FIRST_HALF)}


@pytest.fixture(scope="module")
def kernels():
    with interpreted_kernels("epfsdp2.engine.dense.triton_rotary") as found:
        yield found


@pytest.fixture
def on_cpu(kernels, monkeypatch):
    monkeypatch.setattr(FusedRotary.__init__, "__defaults__", (*FusedRotary.__init__.__defaults__[:-1], "cpu"))
    monkeypatch.setattr(kernels, "_HEADS", 2)


def _function(family):
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names = ("apply_rotary_pos_emb_interleave",) if family == "deepseek_v3" else rotary._NAMES
    return next(getattr(file, name) for name in names if hasattr(file, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FUNCTIONS)
def test_fused_rotary_has_the_bits_of_families_functions_and_their_gradients_to_rounding(on_cpu, family, dtype):
    plain, (batch, width, rotation) = _function(family.partition(" ")[0]), FUNCTIONS[family]
    fused = rotary._fused(plain)
    assert fused.rotation == rotation and (family not in EXACT or fused.takes_parts == family.startswith("glm4"))
    heads = fused.heads[0 if family in EXACT else -1]  # the last by the argument unsqueeze_dim, if there is one
    tables = [drawn(batch, 5, width, seed=seed, dtype=dtype) for seed in (2, 3)]  # whose halves differ
    if fused.arguments == "q k complex":
        tables = [torch.complex(*(table.float() for table in tables))]
    elif rotation.rounds_last and family != "cohere2_moe":
        tables = [table.float() for table in tables]
    # Queries are views of [B, T, H, D], like outputs of projections; keys are parts of wider rows.
    q, k = drawn(2, 5, 3, 24, dtype=dtype).transpose(1, heads % 2 + 1), drawn(2, 5, 40, dtype=dtype, seed=1)[..., 8:32]
    named = {} if heads == fused.heads[0] else {"unsqueeze_dim": heads}
    found = {}
    with mock.patch.object(rotary._Rotated, "apply", wraps=rotary._Rotated.apply) as applied:
        for function in (plain, fused):
            leaves = [x.detach().requires_grad_() for x in (q, k.unsqueeze(heads))]
            if fused.arguments == "x cos sin":
                out = [function(leaf, *tables, **named) for leaf in leaves]
            else:
                out = function(*leaves, *tables, **named)
            grads = [drawn(*y.shape, dtype=dtype, seed=4) for y in out]
            found[function] = out, torch.autograd.grad(out, leaves, grads)
    assert applied.call_count == 2
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for number, (ours, wanted) in enumerate(zip(*(sum(map(tuple, each), ()) for each in found.values()), strict=True)):
        assert ours.dtype == dtype and relative_error(ours, wanted) < bound
        # A complex product in float32 may round its two products at once.
        is_exact = number < len(out) and (dtype == torch.bfloat16 or fused.arguments != "q k complex")
        assert torch.equal(ours, wanted) or not (is_exact or family in EXACT)


def test_function_that_rotates_in_another_way_is_not_replaced(monkeypatch):
    """Rotate backwards, only queries, or by another formula."""
    assert rotary._fused(lambda q, k, cos, sin: HALVES(q, k, cos, -sin)) is None
    for other in (lambda q, k, cos, sin: (HALVES(q, k, cos, sin)[0], k), lambda x, cos, sin: x * cos + x * sin):
        monkeypatch.setattr(modeling_qwen3_moe, "apply_rotary_pos_emb", other)
        with torch.device("meta"):
            model = modeling_qwen3_moe.Qwen3MoeRMSNorm(8)
        assert fuse_rotary(model) == {f"{modeling_qwen3_moe.__name__}.apply_rotary_pos_emb": False}
        assert modeling_qwen3_moe.apply_rotary_pos_emb is other


def test_arguments_that_the_kernel_does_not_support_call_the_plain_function(on_cpu):
    plain = mock.Mock(side_effect=HALVES)
    fused = FusedRotary(plain, Rotation(), heads=(1, 2))
    q, k, cos, sin = drawn(1, 2, 3, 8), drawn(1, 1, 3, 8), drawn(1, 3, 8), drawn(1, 3, 8)
    fused(q, k, cos, sin, unsqueeze_dim=0)
    fused(q, k, cos[0][None, None], sin[0][None, None], 0)
    fused(q.bfloat16(), k.bfloat16(), cos, sin)
    assert plain.call_count == 3
    found = fused(q, k, cos, sin), fused(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    assert plain.call_count == 3
    assert all(torch.equal(y, z.transpose(1, 2)) for y, z in zip(*found, strict=True))
    alone, none = fused(q, None, cos, sin)  # as Mistral Large 4 calls it
    assert torch.equal(alone, found[0][0]) and none is None and plain.call_count == 3


@pytest.fixture
def restored():
    """Restore the functions that ``fuse_rotary`` replaces."""
    yield
    for file in list(sys.modules.values()):
        for name in rotary._NAMES:
            if isinstance(found := vars(file).get(name) if hasattr(file, "__dict__") else None, FusedRotary):
                setattr(file, name, found.plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_of_every_family_calls_the_fused_rotary(restored, name):
    with torch.device("meta"):
        model = FAMILIES[name].build()
    found = fuse_rotary(model)
    assert fuse_rotary(model) == found
    assert found and all(found.values()), name


def test_model_with_fused_norms_and_rotary_has_its_loss_and_gradients(on_cpu, restored, tmp_path):
    folder = save_qwen3_moe(tmp_path, num_hidden_layers=2)
    plain, fused = reference_model(folder), reference_model(folder)
    ids = token_batch(1)[:1, :9]
    losses = [token_loss(plain, ids)]
    assert fuse_rotary(fused) == {f"{modeling_qwen3_moe.__name__}.apply_rotary_pos_emb": True}
    with (
        interpreted_kernels("epfsdp2.engine.dense.triton_norms"),
        mock.patch.object(rotary._Rotated, "apply", wraps=rotary._Rotated.apply) as applied,
    ):
        assert fuse_norms(fused) == {"Qwen3MoeRMSNorm": 1 + 4 * fused.config.num_hidden_layers}
        losses.append(token_loss(fused, ids))
        for loss in losses:
            loss.backward()
    assert applied.call_count == 2 * fused.config.num_hidden_layers
    assert relative_error(losses[1], losses[0]) < 1e-6
    for ours, wanted in zip(fused.parameters(), plain.parameters(), strict=True):
        assert relative_error(ours.grad, wanted.grad) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("arch", (80, 90, 100))
def test_kernel_of_rotary_compiles_for_gpus_without_spills(arch):
    rows = compiled_passes("rotary", str(arch))
    assert {row["arch"] for row in rows} == {arch}
    assert all(row["stack"] == 0 and row["ctas"] * row["warps"] >= 16 for row in rows), rows
