"""Save, resume on other ranks, export to Hugging Face format."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from epfsdp2.engine import checkpoint
from epfsdp2.engine.clip import clip_grad_norm_
from epfsdp2.engine.optimizer import MultiOptimizer, build_multi_optimizer
from epfsdp2.engine.parallelize import layer_names
from epfsdp2.rollout import naming, stream
from tests.support.engine import sharded_model
from tests.support.models import VOCAB, reference_model, save_qwen3_moe, token_loss
from tests.support.ranks import run_ranks

ALL = {"model", "optimizer", "extra"}


def _trainer(folder, ep, fsdp_size=-1, dim="auto"):
    model, meshes = sharded_model(folder, dist.get_world_size(), ep, fsdp_size, expert_shard_dim=dim)
    optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return model, meshes, optimizer, schedule


def _step(trainer, ids):
    model, meshes, optimizer, schedule = trainer
    optimizer.zero_grad()
    rank, each = dist.get_rank(), len(ids) // dist.get_world_size()
    token_loss(model, ids[rank * each : (rank + 1) * each]).backward()
    clip_grad_norm_(model.parameters(), 1.0, meshes)
    optimizer.step()
    schedule.step()


def _full(model, meshes):
    return dict(stream.full_tensors(model, meshes, layer_names(model), 1 << 30))


def _resumes_elsewhere(folder, out, elsewhere):
    ids = torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(2))
    trainer = _trainer(folder, 2)
    _step(trainer, ids)
    model, meshes, optimizer, schedule = trainer
    checkpoint.save_checkpoint(out, model, optimizer, schedule, ALL, step=1)
    saved = _full(model, meshes)
    _step(trainer, ids)
    continued = _full(model, meshes)
    for ep, fsdp_size, dim in elsewhere:
        other = _trainer(folder, ep, fsdp_size, dim)
        checkpoint.load_checkpoint(out, other[0], other[2], other[3], ALL)
        for name, tensor in _full(*other[:2]).items():
            assert torch.equal(tensor, saved[name]), (ep, fsdp_size, dim, name)
        assert other[3].last_epoch == 1 and other[2].param_groups[-1]["lr"] == 5e-3
        _step(other, ids)
        for name, tensor in _full(*other[:2]).items():
            torch.testing.assert_close(tensor, continued[name], rtol=1e-5, atol=1e-6, msg=name)


def test_resume_on_other_meshes(tmp_path):
    folder = save_qwen3_moe(tmp_path / "model")
    elsewhere = [(2, -1, "auto"), (4, -1, "auto"), (1, -1, 0), (2, -1, 0), (1, 2, "auto")]
    run_ranks(_resumes_elsewhere, 4, folder, tmp_path / "ckpt", elsewhere)
    assert json.loads((tmp_path / "ckpt/trainer_state.json").read_text())["step"] == 1
    assert not (tmp_path / "ckpt.partial").exists()


def _export(folder, out, file_bytes):
    checkpoint._HF_FILE_BYTES = file_bytes
    model, meshes = sharded_model(folder, dist.get_world_size(), 2)
    full = stream.full_tensors(model, meshes, layer_names(model), 1 << 16)
    checkpoint.write_hf_weights(out, naming.as_checkpoint(model, full))


@pytest.mark.parametrize("file_bytes", [1 << 30, 1 << 16])
def test_export_is_the_checkpoint_again(tmp_path, file_bytes):
    folder, out = save_qwen3_moe(tmp_path / "model"), tmp_path / "out"
    run_ranks(_export, 4, folder, out, file_bytes)
    original = load_file(folder / "model.safetensors")
    exported = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    assert len(list(out.glob("*.safetensors"))) == (1 if file_bytes == 1 << 30 else len(_files_of(out)))
    (out / "config.json").write_text((folder / "config.json").read_text())
    reloaded, reference = reference_model(out), reference_model(folder)
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), reference.parameters(), strict=True))


def _files_of(folder: Path) -> set[str]:
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())


def test_multi_optimizer_is_one_optimizer():
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    multi = MultiOptimizer({"dense": torch.optim.AdamW([a], lr=0.1), "experts": torch.optim.SGD([b], lr=0.1)})
    assert isinstance(multi, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(multi, lambda step: 0.5**step)
    (a.sum() + b.sum()).backward()
    multi.step()
    schedule.step()
    assert [group["lr"] for o in multi.optimizers.values() for group in o.param_groups] == [0.05, 0.05]
    assert set(multi.state) == {a} and multi.state[a]["exp_avg"].shape == (3,)
    assert torch.equal(b.detach(), torch.full((2,), 0.9))
    state = multi.state_dict()
    multi.load_state_dict(state)
    with pytest.raises(ValueError, match="experts"):
        multi.load_state_dict({"dense": state["dense"]})
    multi.zero_grad()
    assert a.grad is None and b.grad is None


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint of this engine"):
        checkpoint.load_checkpoint(tmp_path, None, None, None, ALL)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    run_ranks(_keeps, 1, tmp_path)


def _keeps(folder):
    paths = [folder / f"global_step_{i}" for i in range(4)]
    for path in paths:
        path.mkdir()
    assert checkpoint.remove_old(paths, None) == paths
    assert checkpoint.remove_old(paths, 2) == paths[2:]
    assert [p.exists() for p in paths] == [False, False, True, True]
