"""Loading reads only a rank's own shards, and its errors name the offender."""

import json
import shutil
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
from tests.support.ranks import each_case, run_ranks


def _every_parameter_is_the_checkpoints(folder, ep, fsdp_size, dim):
    wanted = dict(reference_model(folder).named_parameters())
    model, _ = sharded_model(folder, dist.get_world_size(), ep, fsdp_size, expert_shard_dim=dim)
    for name, param in whole_parameters(model).items():
        assert torch.equal(param, wanted[name]), name


def _every_parameter_in_all(cases):
    each_case(cases, _every_parameter_is_the_checkpoints)


def test_load_weights_on_every_placement_and_on_a_rank_without_experts(tmp_path):
    """Three ranks can share no dim of the second model but its 4 experts, as 2, 2 and none."""
    one_file = save_qwen3_moe(tmp_path / "one", one_file=True, num_experts=12, moe_intermediate_size=36)
    few = save_qwen3_moe(tmp_path / "few", num_experts=4, moe_intermediate_size=40)
    cases = [(one_file, *case) for case in [(1, -1, "auto"), (3, -1, "auto"), (1, -1, 0), (1, 1, "auto")]]
    run_ranks(_every_parameter_in_all, 3, [*cases, (few, 1, -1, "auto")])


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
    cases = [(4, -1, "auto", 1), (1, -1, 1, 1), (2, -1, 0, 1), (2, 2, "auto", 1), (2, -1, "auto", 2), (1, 2, "auto", 2)]
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


def _fails_with(folder, parts):
    with pytest.raises(ValueError) as error:
        sharded_model(folder, dist.get_world_size(), 2)
    assert all(part in str(error.value) for part in parts), error.value


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


def _unreadable_on_one(folder):
    own = folder if dist.get_rank() == 0 else folder.with_name("damaged")
    with pytest.raises(
        RankMismatchError, match=r"(?s)rank 1: SettingError: .*damaged: model-00002-of-00004.safetensors"
    ):
        sharded_model(own, dist.get_world_size(), 2)


def _without_permission(folder):
    obey_permissions()
    with pytest.raises(SettingError, match=r"model-00002-of-00004.safetensors can't be read: .*Permission denied"):
        sharded_model(folder, dist.get_world_size(), 2)


def _each_check(checks):
    each_case(checks, lambda check, *args: check(*args))


def test_load_weights_names_what_is_missing_misshaped_unknown_or_unreadable_on_every_rank(tmp_path):
    one_file = {name: save_qwen3_moe(tmp_path / name, one_file=True) for name in ("larger", "wrong", "expert", "new")}
    config = json.loads((one_file["larger"] / "config.json").read_text())
    (one_file["larger"] / "config.json").write_text(json.dumps(config | {"vocab_size": 2**40}))  # 256 TiB on two ranks
    tensors = load_file(one_file["wrong"] / "model.safetensors")
    expert = {name: tensor for name, tensor in tensors.items() if not name.endswith("0.mlp.experts.7.up_proj.weight")}
    tensors["some.new.weight"], tensors["model.norm.weight"] = torch.ones(3), torch.ones(66)
    del tensors["model.embed_tokens.weight"]
    one = "model.layers.0.mlp.experts.5.up_proj.weight"
    tensors[one] = tensors[one].T.contiguous()
    for name, of_file in (("wrong", tensors), ("expert", expert)):
        save_file(of_file, one_file[name] / "model.safetensors", metadata={"format": "pt"})
    wrong = ["model.embed_tokens.weight is missing", f"{one} (in model.safetensors) is (64, 48)"]
    wrong += ["some.new.weight (in model.safetensors) is no tensor of the model", "model.norm.weight (in "]
    larger = ["model.embed_tokens.weight (in model.safetensors) is", f"needs ({2**40}, 64)"]
    shards, unreadable = save_qwen3_moe(tmp_path / "shards"), save_qwen3_moe(tmp_path / "unreadable")
    shutil.copytree(shards, tmp_path / "damaged")
    with (tmp_path / "damaged" / "model-00002-of-00004.safetensors").open("r+b") as file:
        file.truncate(5000)
    (unreadable / "model-00002-of-00004.safetensors").chmod(0o000)
    checks = [
        (_fails_with, one_file["larger"], larger),
        (_fails_with, one_file["wrong"], [*wrong, "no checkpoint of Qwen3MoeForCausalLM"]),
        (_fails_with, one_file["expert"], ["model.layers.0.mlp.experts"]),
        (_allowed, one_file["new"]),
        (_unreadable_on_one, shards),
        (_verified, shards),
        (_without_permission, unreadable),  # to the process's end
    ]
    run_ranks(_each_check, 2, checks)


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
    "another length of the header": (lambda c: b"\xff" * 8 + c[8:], "header should have 18446744073709551615 bytes"),
    "a header that is no JSON": (lambda c: c[:8] + b"x" * (len(c) - 8), "header is damaged .JSONDecodeError"),
    "no offsets": (lambda c: _header(c, data_offsets=None), "header is damaged"),
    "an offset outside": (lambda c: _header(c, data_offsets=[0, 4800]), r"tensors end at byte \d+, .* it is cut off"),
    "another shape": (lambda c: _header(c, shape=[3, 5]), "[Ii]nvalid"),
    "a pointer": (lambda c: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
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


def test_check_not_quantised_refuses_quantised_weights():
    config = Qwen3MoeConfig(quantization_config={"quant_method": "fp8"})
    with pytest.raises(SettingError, match=r"model.path=some/moe: .* quantised \(fp8\).*recipes.dequantise some/moe "):
        check_not_quantised(config, "some/moe")
    config = Qwen3MoeConfig(quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(SettingError, match=r"quantised \(awq\).*save_pretrained"):
        check_not_quantised(config, "some/moe")
    check_not_quantised(Qwen3MoeConfig(), "some/moe")


def test_open_checkpoint_refuses_a_folder_without_safetensors(tmp_path):
    with pytest.raises(SettingError, match="no \\*.safetensors"):
        safetensors_reader.open_checkpoint(tmp_path)
    with pytest.raises(SettingError, match="is not a folder"):
        safetensors_reader.open_checkpoint(tmp_path / "nowhere")
