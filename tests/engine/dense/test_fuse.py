"""Fused kernels replace what they compute if they run and are right, and a line of log names the replacements."""

import importlib.util
from unittest import mock

import pytest
import torch
from transformers.models.qwen3_moe import modeling_qwen3_moe

from epfsdp2.engine.dense import fuse
from tests.parity.families import FAMILIES
from tests.support.moe.interpreter import interpreted_kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def kernels():
    """Return the kernels of norms and of rotary embeddings."""
    with (
        interpreted_kernels("epfsdp2.engine.dense.triton_norms") as norms,
        interpreted_kernels("epfsdp2.engine.dense.triton_rotary") as rotary,
    ):
        yield norms, rotary


@pytest.fixture
def fused(kernels, monkeypatch, caplog):
    """Return a function that fuses a model, and returns the lines of log."""
    # This restores the function after the test.
    monkeypatch.setattr(modeling_qwen3_moe, "apply_rotary_pos_emb", modeling_qwen3_moe.apply_rotary_pos_emb)

    def call():
        with torch.device("meta"):
            model = FAMILIES["qwen3_moe"].build()
        with mock.patch.object(fuse.dist, "get_rank", return_value=0), caplog.at_level("INFO", "epfsdp2"):
            fuse.fuse_dense(model, "cpu")
        return [record.getMessage() for record in caplog.records if record.name == "epfsdp2"]

    return call


@pytest.mark.parametrize("own", ["", "modeling_qwen3_moe.apply_rotary_pos_emb"])
def test_log_of_fused_kernels_names_replaced_and_unknown_functions(fused, monkeypatch, own):
    if own:
        monkeypatch.setattr(modeling_qwen3_moe, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    line, *left = fused()
    assert "RMSNorm" in line and ("apply_rotary_pos_emb" in line) == (not own)
    assert [line.endswith(own) for line in left] == ([True] if own else [])


def test_kernels_that_do_not_run_or_are_wrong_on_a_device_leave_the_model_as_it_is(fused, kernels, monkeypatch, caplog):
    (norms, rotary), plain = kernels, modeling_qwen3_moe.apply_rotary_pos_emb
    backward, is_wrong = norms.backward, "the kernels compute something else on this GPU"
    fails = mock.Mock(side_effect=RuntimeError("no such instruction\nmore"))
    for kernel, name, broken, why in (
        (norms, "forward", fails, "RuntimeError: no such instruction"),
        (rotary, "rotate", lambda x, *_, **__: x.clone(), is_wrong),
        (norms, "backward", lambda *args: (2 * backward(*args)[0], backward(*args)[1]), is_wrong),
    ):
        caplog.clear()
        with monkeypatch.context() as patched:
            patched.setattr(kernel, name, broken)
            assert fused() == [f"epfsdp2: norms and rotary embeddings are not fused: {why}"]
        assert modeling_qwen3_moe.apply_rotary_pos_emb is plain
