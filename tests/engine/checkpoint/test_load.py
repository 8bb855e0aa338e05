"""Loading reads only a rank's own shards, and its errors name the offender."""

import json
import os
import shutil
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from epfsdp2.engine import build
from epfsdp2.engine.checkpoint import load as loading
from epfsdp2.engine.checkpoint import safetensors_reader
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.model.meta import check_not_quantised
from epfsdp2.engine.preflight.model import check_model_path
from epfsdp2.engine.topology.dtensor import is_expert_parameter
from epfsdp2.engine.topology.rank_consistency import RankMismatchError
from tests.support.engine.sharded import sharded_model, whole_parameters
from tests.support.models.tiny import reference_model, save_qwen3_moe
from tests.support.permissions import obey_permissions
from tests.support.ranks import run_ranks


def _every_parameter_is_the_checkpoints(folder, ep, fsdp_size, dim):
    wanted = dict(reference_model(folder).named_parameters())
    model, _ = sharded_model(folder, dist.get_world_size(), ep, fsdp_size, expert_shard_dim=dim)
    for name, param in whole_parameters(model).items():
        assert torch.equal(param, wanted[name]), name


def _every_parameter_in_all(folder, cases):
    for case in cases:
        _every_parameter_is_the_checkpoints(folder, *case)


def test_load_weights_from_one_file_on_every_placement(tmp_path):
    folder = save_qwen3_moe(tmp_path, one_file=True, num_experts=12, moe_intermediate_size=36)
    run_ranks(_every_parameter_in_all, 3, folder, [(1, -1, "auto"), (3, -1, "auto"), (1, -1, 0), (1, 1, "auto")])


def test_load_weights_on_a_rank_without_experts_loads_the_rest(tmp_path):
    """8 experts on 5 ranks, which divide no other dim: 2, 2, 2, 2 and none."""
    run_ranks(_every_parameter_in_all, 5, save_qwen3_moe(tmp_path), [(1, -1, "auto")])


def test_load_weights_from_several_files_with_tied_weights(tmp_path):
    folder = save_qwen3_moe(tmp_path, tie_word_embeddings=True)
    run_ranks(_every_parameter_in_all, 2, folder, [(2, -1, "auto"), (1, -1, 0)])


def _counted(folder, cases):
    """Count the bytes that loading reads; the verification, which reads two experts again, is left out."""
    world = dist.get_world_size()
    read: dict[str, int] = {}
    original = safetensors_reader.CheckpointFiles.read

    def counting(self, key, index=None):
        tensor = original(self, key, index)
        read[key] = read.get(key, 0) + tensor.nbytes
        return tensor

    safetensors_reader.CheckpointFiles.read = counting
    for ep, fsdp_size, dim, etp in cases:
        read.clear()
        with mock.patch.object(build, "verify_experts"):
            model, meshes = sharded_model(folder, world, ep, fsdp_size, etp, expert_shard_dim=dim)
        is_first = meshes.dense.get_local_rank("dp_replicate") == 0
        for of_experts in (True, False):
            found = sum(nbytes for key, nbytes in read.items() if (".experts." in key) == of_experts)
            held = [p for p in model.parameters() if is_expert_parameter(p) == of_experts]
            wanted = is_first * sum(p.to_local().numel() * torch.bfloat16.itemsize for p in held)
            assert found == wanted, (ep, fsdp_size, dim, etp, of_experts)
    safetensors_reader.CheckpointFiles.read = original


def test_load_weights_reads_only_own_shards_and_nothing_in_a_second_replica(tmp_path):
    cases = [(4, -1, "auto", 1), (2, -1, "auto", 1), (1, -1, 1, 1), (2, -1, 0, 1), (2, 2, "auto", 1)]
    cases += [(2, -1, "auto", 2), (1, -1, 1, 2), (1, 2, "auto", 2)]
    run_ranks(_counted, 4, save_qwen3_moe(tmp_path), cases)


def _verified(folder):
    model, meshes = sharded_model(folder, dist.get_world_size(), 1, expert_shard_dim=1)
    matched = loading.match_weights(model, safetensors_reader.open_checkpoint(folder), meshes)
    first, last = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.down_proj"
    assert loading.verify_experts(model, matched) == [f"{first}[0]", f"{last}[3]"]
    assert len(loading.verify_experts(model, matched, 100)) == 4
    # Gate and up of one expert change places: every element is there, and in the wrong one.
    local = model.get_parameter(first).to_local()
    with torch.no_grad():
        local[0] = local[0].flip(0)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj\[0\] differs from"):
        loading.verify_experts(model, matched)


def test_verify_experts_compares_a_few_experts(tmp_path):
    run_ranks(_verified, 2, save_qwen3_moe(tmp_path))


def _loads_from_the_hub_cache(cache, hub_id, folder):
    os.environ.update(HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE="1")
    import huggingface_hub.constants as hub

    hub.HF_HUB_CACHE, hub.HF_HUB_OFFLINE = str(cache), True
    found = safetensors_reader.open_checkpoint(safetensors_reader.local_checkpoint(hub_id))
    assert found.file_of.keys() == safetensors_reader.open_checkpoint(folder).file_of.keys()


def test_local_checkpoint_finds_a_hub_id_in_the_cache(tmp_path):
    folder = save_qwen3_moe(tmp_path / "model")
    repository = tmp_path / "cache" / "models--some--moe"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    run_ranks(_loads_from_the_hub_cache, 2, tmp_path / "cache", "some/moe", folder)


def _downloads(fails_on):
    rank, calls = dist.get_rank(), []

    def snapshot_download(path, *, local_files_only=False, revision=None, **_):
        calls.append(("finds" if local_files_only else "downloads", revision))
        if rank == fails_on and not local_files_only:
            raise OSError("401 Client Error: Unauthorized")
        return f"the folder of {path}"

    safetensors_reader.snapshot_download = snapshot_download
    safetensors_reader.socket.gethostname = lambda: f"host {rank // 2}"
    os.environ["LOCAL_RANK"] = "0"  # as on verl's Ray workers
    started = time.monotonic()
    if fails_on is None:
        assert safetensors_reader.local_checkpoint("some/moe", "a commit") == "the folder of some/moe"
    else:
        with pytest.raises(RankMismatchError, match=f"rank {fails_on}: OSError: 401 Client Error"):
            safetensors_reader.local_checkpoint("some/moe", "a commit")
    assert time.monotonic() - started < 20
    finds = [] if fails_on is not None else [("finds", "a commit")]
    assert calls == [("downloads", "a commit")] * (rank in (0, 2)) + finds


@pytest.mark.parametrize("fails_on", [None, 0, 2])
def test_local_checkpoint_downloads_once_per_host_and_fails_on_all_ranks(fails_on):
    run_ranks(_downloads, 4, fails_on)


def _fails_with(folder, parts):
    with pytest.raises(ValueError) as error:
        sharded_model(folder, dist.get_world_size(), 2)
    assert all(part in str(error.value) for part in parts), error.value


def test_load_weights_names_a_missing_tensor_on_every_rank(tmp_path):
    folder = save_qwen3_moe(tmp_path, one_file=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_fails_with, 2, folder, ["model.norm.weight is missing", str(folder)])


def test_load_weights_names_a_wrong_shape_on_every_rank(tmp_path):
    folder = save_qwen3_moe(tmp_path, one_file=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(66)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_fails_with, 2, folder, ["model.norm.weight (in model.safetensors) is (66,)", "needs (64,)"])


def test_model_config_of_larger_sizes_than_the_checkpoints_is_refused_before_allocation(tmp_path):
    folder = save_qwen3_moe(tmp_path, one_file=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 2**40}))  # 256 TiB on two ranks
    run_ranks(_fails_with, 2, folder, ["model.embed_tokens.weight (in model.safetensors) is", f"needs ({2**40}, 64)"])


def test_load_weights_lists_the_first_offenders_together(tmp_path):
    folder = save_qwen3_moe(tmp_path, one_file=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["some.new.weight"], tensors["model.norm.weight"] = torch.ones(3), torch.ones(66)
    del tensors["model.embed_tokens.weight"]
    one = "model.layers.0.mlp.experts.5.up_proj.weight"
    tensors[one] = tensors[one].T.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    parts = ["model.embed_tokens.weight is missing", f"{one} (in model.safetensors) is (64, 48)"]
    parts += ["some.new.weight (in model.safetensors) is no tensor of the model", "model.norm.weight (in "]
    run_ranks(_fails_with, 2, folder, [*parts, "no checkpoint of Qwen3MoeForCausalLM"])


def _allowed(folder):
    model, meshes = sharded_model(folder, dist.get_world_size())
    tensors = load_file(folder / "model.safetensors")
    tensors["some.new.weight"] = torch.ones(3)
    dist.barrier()
    if dist.get_rank() == 0:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    files = safetensors_reader.open_checkpoint(folder)
    assert loading.load_weights(model, loading.match_weights(model, files, meshes, may_be_unused=""), meshes) == [
        "some.new.weight"
    ]


def test_load_weights_allows_unused_tensors_if_told_to(tmp_path):
    run_ranks(_allowed, 2, save_qwen3_moe(tmp_path, one_file=True))


def _unreadable_on_one(folder):
    own = folder if dist.get_rank() == 0 else folder.with_name("damaged")
    with pytest.raises(
        RankMismatchError, match=r"(?s)rank 1: SettingError: .*damaged: model-00002-of-00004.safetensors"
    ):
        sharded_model(own, dist.get_world_size(), 2)


def test_load_weights_names_a_truncated_file_on_every_rank(tmp_path):
    folder = save_qwen3_moe(tmp_path / "model")
    shutil.copytree(folder, tmp_path / "damaged")
    with (tmp_path / "damaged" / "model-00002-of-00004.safetensors").open("r+b") as file:
        file.truncate(5000)
    run_ranks(_unreadable_on_one, 2, folder)


def _header(content, **changes):
    """Return the file with other entries for the tensor ``a`` in its header."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["a"] |= changes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


DAMAGES = {
    "a missing end": (lambda c: c[:-4], r"tensors end at byte \d+, and the file has \d+: it is cut off"),
    "more than its tensors": (lambda c: c + bytes(4), r"tensors end at byte \d+, and the file has \d+\."),
    "a header that is cut off": (lambda c: c[:20], r"header should have \d+ bytes, and the file has 20: it is cut off"),
    "no header": (lambda c: c[:3], "it has 3 bytes"),
    "nothing": (lambda c: b"", "it has 0 bytes"),
    "another length of the header": (lambda c: b"\xff" * 8 + c[8:], "header should have 18446744073709551615 bytes"),
    "a header that is no JSON": (lambda c: c[:8] + b"x" * (len(c) - 8), "header is damaged .JSONDecodeError"),
    "a header that is no mapping": (lambda c: (3).to_bytes(8, "little") + b"[1]" + c[8:], "header is damaged"),
    "no offsets": (lambda c: _header(c, data_offsets=None), "header is damaged"),
    "tensors that overlap": (lambda c: _header(c, data_offsets=[44, 92]), "begins at byte .* of its data"),
    "an offset outside of the file": (
        lambda c: _header(c, data_offsets=[0, 4800]),
        "a is F32 .3, 4., and has 4800 bytes",
    ),
    "another shape": (lambda c: _header(c, shape=[3, 5]), "a is F32 .3, 5., and has 48 bytes"),
    "another dtype": (lambda c: _header(c, dtype="F64"), "a is F64 .3, 4., and has 48 bytes"),
    "a negative size": (lambda c: _header(c, shape=[-3, 4]), "a is F32 .-3, 4., and has 48 bytes"),
    "a pointer": (
        lambda c: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "Git LFS pointer",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("has_index", [False, True])
def test_check_files_says_what_is_wrong_with_a_damaged_file(tmp_path, damage, has_index):
    file, (change, words) = tmp_path / "model.safetensors", DAMAGES[damage]
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5)}, file)
    if has_index:
        weight_map = dict.fromkeys("ab", file.name)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    safetensors_reader.check_files(safetensors_reader.open_checkpoint(tmp_path))
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(
        SettingError, match=rf"^critic.model.path={tmp_path}: {file.name} can't be read: .*{words}"
    ) as error:
        check_model_path({"path": str(tmp_path)}, "critic.model")
    assert "What works: " in str(error.value) and "\n" not in str(error.value)
    if has_index:  # as where it is downloaded later: on load
        with pytest.raises(SettingError, match=words):
            safetensors_reader.open_checkpoint(tmp_path).read("a")


@pytest.mark.parametrize(
    "index, words",
    [
        ("{", "model.safetensors.index.json can't be read: JSONDecodeError"),
        ("{}", "model.safetensors.index.json can't be read: KeyError: 'weight_map'"),
        ('{"weight_map": 3}', "model.safetensors.index.json can't be read: TypeError"),
        (
            '{"weight_map": {"a": "model.safetensors", "c": "model.safetensors"}}',
            "model.safetensors .* it lacks c, which",
        ),
        ('{"weight_map": {"a": "gone.safetensors"}}', "its index names gone.safetensors, which is not there"),
    ],
)
def test_check_files_refuses_an_index_of_other_files(tmp_path, index, words):
    save_file({"a": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(SettingError, match=words):
        check_model_path({"path": str(tmp_path)})


def _without_permission(folder):
    obey_permissions()
    with pytest.raises(SettingError, match=r"model-00002-of-00004.safetensors can't be read: .*Permission denied"):
        sharded_model(folder, dist.get_world_size(), 2)


def test_load_weights_names_an_unreadable_file_on_every_rank(tmp_path):
    folder = save_qwen3_moe(tmp_path / "model")
    (folder / "model-00002-of-00004.safetensors").chmod(0o000)
    run_ranks(_without_permission, 2, folder)


def test_check_not_quantised_refuses_quantised_weights():
    config = Qwen3MoeConfig(quantization_config={"quant_method": "fp8"})
    with pytest.raises(SettingError, match=r"model.path=some/moe: .* quantised \(fp8\).*recipes.dequantise some/moe "):
        check_not_quantised(config, "some/moe")
    config = Qwen3MoeConfig(quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(SettingError, match=r"quantised \(awq\).*save_pretrained"):
        check_not_quantised(config, "some/moe")
    check_not_quantised(Qwen3MoeConfig(), "some/moe")


def test_load_weights_names_a_missing_expert(tmp_path):
    folder = save_qwen3_moe(tmp_path, one_file=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.7.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_fails_with, 2, folder, ["model.layers.0.mlp.experts"])


def test_open_checkpoint_refuses_a_folder_without_safetensors(tmp_path):
    with pytest.raises(SettingError, match="no \\*.safetensors"):
        safetensors_reader.open_checkpoint(tmp_path)
    with pytest.raises(SettingError, match="is not a folder"):
        safetensors_reader.open_checkpoint(tmp_path / "nowhere")
