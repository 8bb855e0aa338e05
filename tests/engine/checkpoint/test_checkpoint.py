"""Save, resume on other ranks, export to Hugging Face format."""

import json
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoConfig

from epfsdp2.engine.checkpoint import export_hf
from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST, CheckpointError, partial_dir
from epfsdp2.engine.checkpoint.saves import remove_old
from epfsdp2.engine.checkpoint.stored_shards import first_held, read_shards, stored_tensors, write_shards
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.topology.rank_consistency import RankMismatchError
from tests.support.engine.checkpoints import ALL, build_trainer, raise_full_disk, save_checkpoint, train_step
from tests.support.engine.sharded import sharded_model
from tests.support.models.published import stored_values
from tests.support.models.tiny import VOCAB, reference_model, save_qwen3_moe
from tests.support.permissions import obey_permissions
from tests.support.ranks import each_case, run_ranks
from tests.support.scale import on_fake_ranks


def _other_algorithms_are_refused(folder, out):
    ids = torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(2))
    for saves in (False, True):
        trainer = build_trainer(folder, 2, muon=saves)
        train_step(trainer, ids)
        save_checkpoint(out, trainer[0], trainer[2], trainer[3], ALL, step=1)
        model, _, optimizer, schedule = build_trainer(folder, 2, muon=not saves)
        before = {name: param.to_local().clone() for name, param in model.named_parameters()}
        was, now = ("Muon", "AdamW") if saves else ("AdamW", "Muon")
        with pytest.raises(ValueError, match=rf"self_attn.*q_proj.* is {was}'s, this run's optimizer for it is {now}"):
            checkpoint.load_checkpoint(out, model, optimizer, schedule, {"model", "optimizer"})
        assert all(torch.equal(before[name], param.to_local()) for name, param in model.named_parameters())
        assert not optimizer.state
        with pytest.raises(ValueError, match="Leave extra out of checkpoint.load_contents"):
            checkpoint.load_checkpoint(out, model, optimizer, schedule, {"model", "extra"})
        assert all(torch.equal(before[name], param.to_local()) for name, param in model.named_parameters())
        checkpoint.load_checkpoint(out, model, optimizer, schedule, {"model"})
        trained = dict(trainer[0].named_parameters())
        assert all(torch.equal(trained[name].to_local(), p.to_local()) for name, p in model.named_parameters())
        dist.barrier()


def _weights_alone_hold_no_optimizer(folder, out):
    model, _, optimizer, schedule = build_trainer(folder, 1)
    save_checkpoint(out, model, optimizer, schedule, {"model", "extra"}, step=1)
    with pytest.raises(SettingError, match=r"holds no optimizer state. What works: .*load_contents=\[model,extra\]"):
        checkpoint.load_checkpoint(out, model, optimizer, schedule, ALL)
    checkpoint.load_checkpoint(out, model, optimizer, schedule, {"model", "extra"})


def _loads_without(folder, out):
    model, _, optimizer, schedule = build_trainer(folder, 2)
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}
    save_checkpoint(out / "whole", model, optimizer, schedule, ALL, step=1)
    save_checkpoint(out / "weights", model, optimizer, schedule, {"hf_model"}, step=1)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    for name, contents, words in (
        ("weights", {"hf_model"}, "holds no state to resume from.*model.path=.*weights/huggingface"),
        ("weights", ALL, "holds no state to resume from"),
        ("whole", {"optimizer", "extra"}, "is without model"),
        ("whole", set(), "is without model"),
    ):
        with pytest.raises(SettingError, match=words):
            checkpoint.load_checkpoint(out / name, model, optimizer, schedule, contents)
    with mock.patch.object(checkpoint.logger, "warning") as warned:
        checkpoint.load_checkpoint(out / "whole", model, optimizer, schedule, {"model"})
    assert warned.call_args_list == [mock.call(mock.ANY, out / "whole", ["extra", "optimizer"])][dist.get_rank() :]
    assert all(torch.equal(before[name], param.to_local()) for name, param in model.named_parameters())


def _unstepped_parameters(folder, out):
    model, _, optimizer, schedule = build_trainer(folder, 2, muon=True)
    name = "model.layers.0.mlp.experts.down_proj"
    for fqn, param in model.named_parameters():
        param.grad = None if fqn == name else torch.ones_like(param)
    optimizer.step()
    save_checkpoint(out, model, optimizer, schedule, ALL, step=1)
    other, _, fresh, schedule = build_trainer(folder, 1, muon=True)
    checkpoint.load_checkpoint(out, other, fresh, schedule, ALL)
    state = fresh.state_dict()["state"]
    assert name not in state and state.keys() == {n for n, _ in other.named_parameters()} - {name}
    assert all(param.grad is None for param in other.parameters())


def _export(folder, out, file_bytes, contents):
    model, _ = sharded_model(folder, dist.get_world_size(), 2)
    describe = AutoConfig.from_pretrained(folder).save_pretrained
    with (
        mock.patch.object(checkpoint, "write_hf_weights", partial(export_hf.write_hf_weights, file_bytes=file_bytes)),
        mock.patch.object(export_hf, "SafetensorsFile", wraps=export_hf.SafetensorsFile) as opened,
    ):
        save_checkpoint(out, model, None, None, contents, 1, describe)
    files = [call.args[0] for call in opened.call_args_list]
    assert len(set(files)) == len(files) <= dist.get_world_size()  # each once, whatever the number of tensors


def _each_export(folder, exports):
    each_case([(folder, *export) for export in exports], _export)


def test_export_equals_the_loaded_checkpoint(tmp_path):
    folder = save_qwen3_moe(tmp_path / "model")
    exports = [(tmp_path / "one", 1 << 30, {"hf_model"}), (tmp_path / "several", 1 << 16, {"model", "hf_model"})]
    run_ranks(_each_export, 4, folder, exports)
    original, reference = stored_values(folder), reference_model(folder)
    known = {MANIFEST, checkpoint.SHARDS, checkpoint.HF, "trainer_state.json"}
    for saved, file_bytes, contents in exports:
        assert (saved / checkpoint.SHARDS).exists() == ("model" in contents)
        assert {path.name for path in saved.iterdir()} <= known
        out = saved / checkpoint.HF
        exported = stored_values(out)
        assert exported.keys() == original.keys()
        assert all(torch.equal(exported[name], original[name]) for name in original)
        assert (len(list(out.glob("*.safetensors"))) > 1) == (out / "model.safetensors.index.json").is_file()
        assert (out / "model.safetensors").is_file() == (file_bytes == 1 << 30)
        reloaded = reference_model(out)
        assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), reference.parameters(), strict=True))


def _no_checkpoint(folder):
    with pytest.raises(CheckpointError, match="no complete checkpoint of this engine"):
        checkpoint.load_checkpoint(folder, None, None, None, ALL)


def _damaged(folder, out):
    model, _, optimizer, schedule = trainer = build_trainer(folder, 2)
    train_step(trainer, torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(2)))
    save_checkpoint(out, model, optimizer, schedule, ALL, step=1)
    assert {path.suffix for path in out.rglob("*") if path.is_file()} == {".safetensors", ".json"}  # no pickle
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}

    shard, manifest = next((out / "dist_ckpt").glob("*00002*.safetensors")), out / MANIFEST
    changes = [
        (shard, rf"{shard.name} \(its checksum differs\)", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        (shard, rf"{shard.name} \(\d+ of \d+ bytes\)", lambda content: content[:-8]),
        (shard, rf"{shard.name} \(missing\)", None),
        (
            manifest,
            "newer format 3; this version of epfsdp2 reads 2",
            lambda c: c.replace(b'"format": 2', b'"format": 3'),
        ),
        (manifest, f"{MANIFEST} is damaged", lambda content: content[:-8]),
    ]
    for path, words, change in changes:
        content = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            path.unlink() if change is None else path.write_bytes(change(content))
        dist.barrier()
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load_checkpoint(out, model, optimizer, schedule, ALL)
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(content)
        dist.barrier()
    assert all(torch.equal(before[name], param.to_local()) for name, param in model.named_parameters())
    checkpoint.load_checkpoint(out, model, optimizer, schedule, ALL)


def _without_permission(folder, out, read_only):
    model, _, optimizer, schedule = build_trainer(folder, 2)
    save_checkpoint(out, model, optimizer, schedule, ALL, step=1)
    shard = next((out / "dist_ckpt").glob("*00002*.safetensors"))
    obey_permissions()

    def is_refused(path, mode, words, save_to=None):
        before = path.stat().st_mode
        dist.barrier()
        if dist.get_rank() == 0:
            path.chmod(mode)
        dist.barrier()
        with pytest.raises((CheckpointError, PermissionError, RankMismatchError), match=words):
            if save_to is not None:
                save_checkpoint(save_to, model, optimizer, schedule, ALL, step=2)
            else:
                checkpoint.load_checkpoint(out, model, optimizer, schedule, ALL)
        dist.barrier()
        if dist.get_rank() == 0:
            path.chmod(before)
        dist.barrier()

    is_refused(shard, 0o000, rf"{shard.name} \(can't be read: Permission denied\)")
    is_refused(out / MANIFEST, 0o000, rf"Permission denied: .*{MANIFEST}")
    is_refused(out, 0o000, f"Permission denied: .*{out.name}")
    is_refused(read_only, 0o500, "Permission denied: .*global_step_2", read_only / "global_step_2" / "actor")
    checkpoint.load_checkpoint(out, model, optimizer, schedule, ALL)


def _of_another_model(folder, other, out):
    model, _, _, schedule = build_trainer(folder, 2)
    save_checkpoint(out, model, None, schedule, {"model"}, step=1)
    different, *_ = build_trainer(other, 2)
    with pytest.raises(CheckpointError, match=r"another model: .*weight \(in .*safetensors\) is \(.*the model's is"):
        checkpoint.load_checkpoint(out, different, None, None, {"model"})


def _fails_on_one_rank(folder, out):
    model, _, optimizer, schedule = build_trainer(folder, 2)
    save_checkpoint(out, model, optimizer, schedule, ALL, step=1)
    save = raise_full_disk if dist.get_rank() == 1 else checkpoint.save_file
    failure = pytest.raises((OSError, RankMismatchError), match="No space left on device")
    with mock.patch.object(checkpoint, "save_file", save), failure:
        save_checkpoint(out, model, optimizer, schedule, ALL, step=2)
    assert not partial_dir(out).exists() or dist.get_rank() != 0
    checkpoint.load_checkpoint(out, model, optimizer, schedule, ALL)
    assert json.loads((out / "trainer_state.json").read_text())["step"] == 1


def _keeps(folder):
    """The newest, and the one that verl would resume from."""
    paths = [folder / f"global_step_{i}/actor" for i in range(5)]
    if dist.get_rank() == 0:
        for path in paths:
            path.mkdir(parents=True)
    dist.barrier()
    assert remove_old(paths, None) == paths
    assert remove_old(paths, 4) == paths[1:]
    tracker = folder / "latest_checkpointed_iteration.txt"
    for named, left in (("3", paths[3:]), ("4", paths[4:])):
        dist.barrier()
        if dist.get_rank() == 0:
            tracker.write_text(named)
        dist.barrier()
        assert remove_old(paths[1:], 1) == left
    dist.barrier()
    assert [path for path in paths if path.exists()] == paths[4:]


def _each_check(checks):
    each_case(checks, lambda check, *args: check(*args))


def test_checkpoint_that_is_damaged_or_of_another_run_is_refused_by_name_before_anything_changes(tmp_path):
    folder, other = save_qwen3_moe(tmp_path / "model"), save_qwen3_moe(tmp_path / "other", hidden_size=32)
    (tmp_path / "read_only").mkdir()
    (tmp_path / "empty").mkdir()
    of_model = (
        _other_algorithms_are_refused,
        _weights_alone_hold_no_optimizer,
        _loads_without,
        _unstepped_parameters,
        _damaged,
        _fails_on_one_rank,
    )
    checks = [(check, folder, tmp_path / check.__name__) for check in of_model]
    checks += [(_no_checkpoint, tmp_path / "empty"), (_keeps, tmp_path / "kept")]
    checks += [(_of_another_model, folder, other, tmp_path / "of_another")]
    checks += [(_without_permission, folder, tmp_path / "unreadable", tmp_path / "read_only")]  # to the process's end
    run_ranks(_each_check, 2, checks)


def _saves_random_state(folder, out):
    model, _, optimizer, schedule = build_trainer(folder, 1)
    torch.manual_seed(100 + dist.get_rank())
    save_checkpoint(out, model, optimizer, schedule, ALL, step=1)


def _resumes_with_more_ranks(folder, out):
    model, _, optimizer, schedule = build_trainer(folder, 1)
    lines = []
    checkpoint.logger.addFilter(lambda record: lines.append(record.getMessage()))
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        checkpoint.load_checkpoint(out, model, optimizer, schedule, ALL)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[1], "what was drawn before does not count"
    everyone = [None] * 4
    dist.all_gather_object(everyone, tuple(drawn[0]))
    saved = [tuple(torch.rand(4, generator=torch.Generator().manual_seed(100 + rank)).tolist()) for rank in range(2)]
    assert everyone[:2] == saved and len(set(everyone)) == 4
    said = "has the random state of 2 ranks and this run has 4: the others start from a seed"
    assert [said in line for line in lines] == [True, True] * (dist.get_rank() == 0)


def test_load_checkpoint_on_more_ranks_seeds_them_and_logs_it(tmp_path):
    folder = save_qwen3_moe(tmp_path / "model")
    run_ranks(_saves_random_state, 2, folder, tmp_path / "ckpt")
    run_ranks(_resumes_with_more_ranks, 4, folder, tmp_path / "ckpt")


def test_shards_are_in_the_format_of_torchs_distributed_checkpoint(tmp_path):
    values = {"a": torch.randn(5, 3), "b": torch.randn(()), "c": torch.randn(2, 7, dtype=torch.bfloat16)}
    for name in ("ours", "torchs"):
        (tmp_path / name).mkdir()
    for rank in range(3):
        with on_fake_ranks(3, rank):
            mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
            of_rank = {
                n: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for n, t in values.items() if t.dim()
            }
            write_shards(tmp_path / "ours", first_held({**values, **of_rank}, rank), rank + 1, 3)
    assert len(list((tmp_path / "ours").iterdir())) == 3
    loaded = {name: torch.zeros_like(value) for name, value in values.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process loads and saves
        dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "ours")), no_dist=True)
        writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "torchs"), save_distributed=True)
        dcp.save(values, storage_writer=writer, no_dist=True)
    assert all(torch.equal(loaded[name], value) for name, value in values.items())
    read = {name: torch.zeros_like(value) for name, value in values.items()}
    read_shards(stored_tensors(tmp_path / "torchs"), read)
    assert all(torch.equal(read[name], value) for name, value in values.items())
