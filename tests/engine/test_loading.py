"""Loading: only what a rank owns, and errors that name the offender."""

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from epfsdp2.engine import loading
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.shards import is_expert_parameter
from tests.support.engine import sharded_model
from tests.support.models import reference_model, save_qwen3_moe
from tests.support.ranks import run_ranks


def _every_parameter_is_the_checkpoints(folder, ep, fsdp_size, dim):
    wanted = dict(reference_model(folder).named_parameters())
    model, _ = sharded_model(folder, dist.get_world_size(), ep, fsdp_size, expert_shard_dim=dim)
    for name, param in model.named_parameters():
        assert torch.equal(param.detach().full_tensor(), wanted[name]), name


def _every_parameter_in_all(folder, cases):
    for case in cases:
        _every_parameter_is_the_checkpoints(folder, *case)


def _sharded_into_files(folder):
    """The same checkpoint in three files with an index."""
    tensors = load_file(folder / "model.safetensors")
    weight_map = {}
    for i in range(3):
        part = dict(sorted(tensors.items())[i::3])
        save_file(part, folder / f"model-{i + 1:05d}-of-00003.safetensors", metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, f"model-{i + 1:05d}-of-00003.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    os.remove(folder / "model.safetensors")
    return folder


def test_one_file_on_every_placement(tmp_path):
    folder = save_qwen3_moe(tmp_path, num_experts=12, moe_intermediate_size=36)
    run_ranks(_every_parameter_in_all, 3, folder, [(1, -1, "auto"), (3, -1, "auto"), (1, -1, 0), (1, 1, "auto")])


def test_a_rank_that_holds_no_expert_loads_the_rest(tmp_path):
    """8 experts on 5 ranks that no other dim divides by: 2, 2, 2, 2 and none."""
    run_ranks(_every_parameter_in_all, 5, save_qwen3_moe(tmp_path), [(1, -1, "auto")])


def test_several_files_and_tied_weights(tmp_path):
    folder = _sharded_into_files(save_qwen3_moe(tmp_path, tie_word_embeddings=True))
    run_ranks(_every_parameter_in_all, 2, folder, [(2, -1, "auto"), (1, -1, 0)])


def _bytes_read(folder):
    """Count what is read of the files for experts."""
    read = []
    original = loading.CheckpointFiles.read

    def counting(self, key, index=None):
        tensor = original(self, key, index)
        if ".experts." in key:
            read.append(tensor.nbytes)
        return tensor

    loading.CheckpointFiles.read = counting
    model, _ = sharded_model(folder, dist.get_world_size(), dist.get_world_size())
    loading.CheckpointFiles.read = original
    own = sum(p.to_local().nbytes for p in model.parameters() if is_expert_parameter(p))
    assert sum(read) == own


def test_a_rank_reads_its_own_experts_only(tmp_path):
    run_ranks(_bytes_read, 2, save_qwen3_moe(tmp_path))


def _loads_from_the_hub_cache(cache, hub_id, folder):
    os.environ.update(HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE="1")
    import huggingface_hub.constants as hub

    hub.HF_HUB_CACHE, hub.HF_HUB_OFFLINE = str(cache), True
    found = loading.open_checkpoint(loading.local_checkpoint(hub_id))
    assert found.file_of.keys() == loading.open_checkpoint(folder).file_of.keys()


def test_a_hub_id_is_found_in_the_cache(tmp_path):
    folder = save_qwen3_moe(tmp_path / "model")
    repository = tmp_path / "cache" / "models--some--moe"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    run_ranks(_loads_from_the_hub_cache, 2, tmp_path / "cache", "some/moe", folder)


def _fails_with(folder, parts):
    with pytest.raises(ValueError) as error:
        sharded_model(folder, dist.get_world_size(), 2)
    assert all(part in str(error.value) for part in parts), error.value


def test_a_missing_tensor_is_named_on_every_rank(tmp_path):
    folder = save_qwen3_moe(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_fails_with, 2, folder, ["model.norm.weight", str(folder), "lacks 1"])


def test_a_wrong_shape_is_named_on_every_rank(tmp_path):
    folder = save_qwen3_moe(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(66)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_fails_with, 2, folder, ["model.norm.weight", "66"])


def test_a_missing_expert_is_named(tmp_path):
    folder = save_qwen3_moe(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.7.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_fails_with, 2, folder, ["model.layers.0.mlp.experts"])


def test_a_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(SettingError, match="no \\*.safetensors"):
        loading.open_checkpoint(tmp_path)
    with pytest.raises(SettingError, match="is not a folder"):
        loading.open_checkpoint(tmp_path / "nowhere")
