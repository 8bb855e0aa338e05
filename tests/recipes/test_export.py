"""A run's checkpoint becomes a Hugging Face model again, bit for bit."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from epfsdp2.recipes import export
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.sharded import sharded_model
from tests.support.models.published import stored_values
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks

KINDS = {"plain": False, "tied": True}


def _saves(folder, out):
    model, _ = sharded_model(folder, 4, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)

    describe = AutoConfig.from_pretrained(folder).save_pretrained
    save_checkpoint(out, model, None, None, {"model"}, 1, describe)


def _save_both(folder, saved):
    for kind in KINDS:
        _saves(folder / kind, saved / kind)


def test_export_of_a_trained_model_has_its_weights_bit_for_bit(tmp_path):
    for kind, tied in KINDS.items():
        save_qwen3_moe(tmp_path / "model" / kind, tie_word_embeddings=tied)
    run_ranks(_save_both, 4, tmp_path / "model", tmp_path / "saved")
    for kind in KINDS:
        out = tmp_path / "out" / kind
        assert export.main([str(tmp_path / "saved" / kind), str(out), "--file-gigabytes", "0.0001"]) == 0
        original, exported = stored_values(tmp_path / "model" / kind), stored_values(out)
        assert len(list(out.glob("*.safetensors"))) > 1
        assert exported.keys() == original.keys()
        assert all(torch.equal(exported[name], original[name] * 1.5) for name in original)
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        assert torch.equal(model.model.norm.weight, original["model.norm.weight"] * 1.5)


def test_export_of_bad_input_names_it(tmp_path, capsys):
    (tmp_path / "c").mkdir()
    assert export.main([str(tmp_path / "c"), str(tmp_path / "out")]) == 1
    assert "no complete checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
