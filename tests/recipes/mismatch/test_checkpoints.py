"""Checkpoints of this engine, of verl's fsdp2 engine and Hugging Face models are read alike."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig

from epfsdp2.recipes.mismatch.checkpoint import hf_folder, step_of
from epfsdp2.recipes.mismatch.cli import main
from epfsdp2.recipes.mismatch.model import Setup
from epfsdp2.recipes.mismatch.rollouts import RolloutError
from tests.recipes.mismatch.planted import plant, random_responses
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.sharded import sharded_model
from tests.support.models.published import stored_values
from tests.support.models.tiny import reference_model, save_qwen3_moe
from tests.support.ranks import run_ranks


def _saves(folder, ours, verls):
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import apply_fsdp2
    from verl.workers.engine.fsdp.utils import create_device_mesh

    own, _ = sharded_model(folder, 2, 2)
    plain = reference_model(folder)
    apply_fsdp2(plain, {"mesh": create_device_mesh(2, -1), "mp_policy": MixedPrecisionPolicy()}, {})
    optimizer = torch.optim.AdamW(plain.parameters())
    with torch.no_grad():
        for model in (own, plain):
            for param in model.parameters():
                param.mul_(1.5)
    describe = AutoConfig.from_pretrained(folder).save_pretrained
    save_checkpoint(ours, own, None, None, {"model"}, 11, describe)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    FSDPCheckpointManager(plain, optimizer, schedule).save_checkpoint(str(verls), global_step=11)
    assert dist.get_world_size() == 2


def test_checkpoint_of_each_engine_explains_the_same_rollouts(tmp_path, capsys):
    folder = save_qwen3_moe(tmp_path / "model", one_file=True)
    saved = [tmp_path / engine / "global_step_11" / "actor" for engine in ("ours", "verls")]
    run_ranks(_saves, 2, folder, *saved, timeout=200)
    (tmp_path / "a").mkdir()
    trained = hf_folder(saved[0], tmp_path / "a")
    original, found = stored_values(folder), stored_values(trained)
    assert all(torch.equal(found[name], original[name] * 1.5) for name in original)

    (tmp_path / "13").mkdir()
    rollouts = plant(trained, Setup("float32", head="bfloat16"), random_responses(trained, 3), tmp_path / "13/a.jsonl")
    (tmp_path / "13" / "meta.json").write_text(json.dumps({"global_steps": 13}))
    for path in (*saved, saved[1].parent):
        capsys.readouterr()
        out = tmp_path / "out.json"
        assert main([str(path), str(rollouts.parent), "--dtype", "float32", "--json", str(out), "--device", "cpu"]) == 0
        first = json.loads(out.read_text())["causes"][0]
        assert first["name"] == "dtype of the head: bfloat16" and first["share"] > 0.999
        said = " ".join(capsys.readouterr().out.split())
        assert "is of step 11; rollouts of step 13 are sampled with the weights of step 12." in said


def test_folder_without_a_model_and_another_model_are_refused(tmp_path, capsys):
    with pytest.raises(RolloutError, match="holds no model. What works: a Hugging Face model"):
        hf_folder(tmp_path, tmp_path)
    assert step_of(tmp_path / "global_step_7" / "actor") == 7 and step_of(tmp_path) is None
    now = save_qwen3_moe(tmp_path / "now")
    other = save_qwen3_moe(tmp_path / "other", num_experts=4)
    rollouts = plant(now, Setup(), random_responses(now, 1), tmp_path / "a.jsonl")
    assert main([str(now), str(rollouts), "--previous", str(other), "--device", "cpu"]) == 1
    assert "holds another model than" in capsys.readouterr().out
