"""Fused kernels are put in place where they run and are right, and one line of log says what was."""

import importlib.util
from unittest import mock

import pytest
import torch
import transformers
from transformers.models.qwen3_moe import modeling_qwen3_moe

from epfsdp2.engine.dense import fuse
from tests.parity.families import FAMILIES
from tests.support.moe.interpreter import interpreted_kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def kernels():
    """The kernels of norms and of rotary embeddings."""
    with (
        interpreted_kernels("epfsdp2.engine.dense.triton_norms") as norms,
        interpreted_kernels("epfsdp2.engine.dense.triton_rotary") as rotary,
    ):
        yield norms, rotary


@pytest.fixture
def fused(kernels, monkeypatch, caplog):
    """Fuse a model; returns its norms' class, and the lines of log."""
    # Set to itself, it is set back after the test.
    monkeypatch.setattr(modeling_qwen3_moe, "apply_rotary_pos_emb", modeling_qwen3_moe.apply_rotary_pos_emb)
    family = FAMILIES["qwen3_moe"]

    def call():
        with torch.device("meta"):
            model = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.sizes))
        with mock.patch.object(fuse.dist, "get_rank", return_value=0), caplog.at_level("INFO", "epfsdp2"):
            fuse.fuse_dense(model, "cpu")
        return [record.getMessage() for record in caplog.records if record.name == "epfsdp2"]

    return call


@pytest.mark.parametrize("own", ["", "modeling_qwen3_moe.apply_rotary_pos_emb"])
def test_log_names_what_is_fused_and_what_rotates_in_its_own_way(fused, monkeypatch, own):
    if own:
        monkeypatch.setattr(modeling_qwen3_moe, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    line, *left = fused()
    assert "RMSNorm" in line and ("apply_rotary_pos_emb" in line) == (not own)
    assert [line.endswith(own) for line in left] == ([True] if own else [])


@pytest.mark.parametrize("kind", ["does not run", "wrong values", "wrong gradient"])
def test_kernels_that_do_not_run_or_are_wrong_on_a_device_leave_the_model_as_it_is(fused, kernels, monkeypatch, kind):
    norms, rotary = kernels
    if kind == "does not run":
        monkeypatch.setattr(norms, "forward", mock.Mock(side_effect=RuntimeError("no such instruction\nmore")))
    elif kind == "wrong values":
        monkeypatch.setattr(rotary, "rotate", lambda x, *_, **__: x.clone())
    else:
        backward = norms.backward
        monkeypatch.setattr(norms, "backward", lambda *args: (2 * backward(*args)[0], backward(*args)[1]))
    before = modeling_qwen3_moe.apply_rotary_pos_emb
    why = (
        "RuntimeError: no such instruction"
        if kind == "does not run"
        else "the kernels compute something else on this GPU"
    )
    assert fused() == [f"epfsdp2: norms and rotary embeddings are not fused: {why}"]
    assert modeling_qwen3_moe.apply_rotary_pos_emb is before
