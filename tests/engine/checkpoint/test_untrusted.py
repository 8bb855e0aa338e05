"""Checkpoints, adapters and configs of a stranger: an error with the file's name, and no code, no write, no memory."""

import json
import random
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from epfsdp2.engine.checkpoint import safetensors_reader
from epfsdp2.engine.checkpoint.atomic_folder import FORMAT, MANIFEST, CheckpointError, copy_files, verify_files
from epfsdp2.engine.checkpoint.stored_shards import STATE, overlapping, read_facts, read_shards, stored_tensors
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.lora.peft_files import read_adapter
from epfsdp2.engine.lora.settings import LoraSettings
from epfsdp2.engine.model.safetensors_files import SafetensorsFile
from epfsdp2.engine.preflight.model import inspect_model
from epfsdp2.recipes.plan.cards import config_of
from tests.support.models.tiny import save_qwen3_moe
from tests.support.scale import on_fake_ranks

HUGE = (2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40)
NUMBERS = (*HUGE, -1, -(2**63), 1.5, 1e308, True, None, "4", [], [4], {}, "4" * 1000)
DEEP = b'{"a":' * 100_000


def _names(header):
    return [name for name in header if name != "__metadata__"]


def _shapes(shape, rng):
    return [
        [rng.choice(NUMBERS)],
        [*shape, rng.choice(NUMBERS)],
        [rng.choice(HUGE)] * rng.randint(1, 4),
        [0, rng.choice(HUGE[2:])],  # no bytes, and no tensor of torch
        [1] * 5000 + shape,
        [shape[0] + rng.randint(1, 9), *shape[1:]],
        rng.choice(NUMBERS[:-4]),
    ]


def _offsets(begin, end, rng):
    moved = rng.choice([-8, -4, -1, 1, 4, 8, 1 << 20, *HUGE])
    return [[begin + moved, end + moved], [begin, end + moved], [end, begin], [begin], [begin, end, end], [begin, None]]


def _change_header(header, what, rng):
    name, other = rng.sample(_names(header), 2)
    entry = header[name]
    if what == "shape":
        entry["shape"] = rng.choice(_shapes(entry["shape"], rng))
    elif what == "offsets":
        entry["data_offsets"] = rng.choice([*_offsets(*entry["data_offsets"], rng), header[other]["data_offsets"]])
    elif what == "dtype":
        entry["dtype"] = rng.choice(["F16", "F64", "I8", "F128", "U4", "", "f32", "object", None, 4, ["F32"]])
    elif what == "metadata":
        header["__metadata__"] = rng.choice([3, [], "x", {"a": 1}, {"a": None}, {"a": {}}])
    else:
        del entry[rng.choice(list(entry))]


def _change_text(text, rng):
    name = rng.choice("abc").encode()
    begin = text.index(b'"' + name + b'":')
    entry = text[begin : text.index(b"}", begin) + 1]
    text, at = text.rstrip(), rng.randrange(len(text.rstrip()))
    damaged = [text[:at], b"", b"[]", b"null", DEEP, text[:at] + b"\xff\x00" + text[at:], text + b"}"]
    return rng.choice([*damaged, *[text.replace(entry, entry + b", " + entry)] * 7])  # a tensor that is named twice


def _damaged(data, rng):
    """The file's bytes with one thing changed that no valid file has."""
    length = int.from_bytes(data[:8], "little")
    text, tensors = data[8 : 8 + length], data[8 + length :]
    what = rng.choice(["shape", "offsets", "dtype", "metadata", "lacks", "text", "text", "length", "cut"])
    if what == "cut":
        return data[: rng.randrange(len(data))] if rng.random() < 0.7 else data + bytes(rng.randint(1, 99))
    if what == "length":
        wrong = rng.choice([0, 1, len(data), 100_000_001, 2**31, 2**63, 2**64 - 1, rng.randrange(2**64)])
        return wrong.to_bytes(8, "little") + data[8:]
    if what == "text":
        text = _change_text(text, rng)
    else:
        header = json.loads(text)
        _change_header(header, what, rng)
        text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def _of_a_model(path):
    files = safetensors_reader.open_checkpoint(path.parent)
    safetensors_reader.check_files(files)
    for name in files.file_of:
        files.read(name)


def _of_an_adapter(path):
    read_adapter(path.parent, SimpleNamespace(targets={}, saved=[]), "model.lora_adapter_path")


def _of_a_run(path):
    stored_tensors(path.parent)


@pytest.mark.parametrize("number", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_safetensors_readers_of_damaged_headers_raise_with_the_files_name(tmp_path, number):
    places = {
        _of_a_model: (tmp_path / "model" / "model.safetensors", SettingError),
        _of_an_adapter: (tmp_path / "adapter" / "adapter_model.safetensors", SettingError),
        _of_a_run: (tmp_path / "dist_ckpt" / "shard-00001-model-00001-of-00001.safetensors", CheckpointError),
    }
    for path, _ in places.values():
        path.parent.mkdir()
        save_file({"a": torch.ones(3, 4), "b": torch.ones(5), "c": torch.ones(2, 2, dtype=torch.int32)}, path)
        SafetensorsFile(path).read("a")
    data, rng, before = path.read_bytes(), random.Random(0), 0
    for i in range(number):
        read, (path, kind) = list(places.items())[i % len(places)]
        content = _damaged(data, rng)
        path.write_bytes(content)
        with pytest.raises(kind) as caught:
            read(path)
            pytest.fail(f"number {i} was read: {content[:400]!r}")
        assert path.name in str(caught.value), content[:400]
        if i == 300:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"


def _shard(path, places, shape=(2, 4), name="model.a"):
    path.parent.mkdir(exist_ok=True)
    text = places if isinstance(places, str) else json.dumps(places)
    save_file({name: torch.ones(shape)}, path, metadata={"format": "pt", "DCP_SHARDING_INFO": text})


@pytest.mark.parametrize(
    ("places", "words"),
    [
        *(({"model.a": {"saved_offsets": [at, 0]}}, "does not say where") for at in (*HUGE[2:], -1, 1.5, "0", True)),
        *(({"model.a": {"saved_offsets": at}}, "does not say where") for at in (None, 3, [0], [0, 0, 0], {})),
        *(({"model.a": {"saved_offsets": [at, 0]}}, "do not make up whole tensors") for at in (2, 2**31, 2**40)),
        ({"model.a": 3}, "are damaged"),
        ([], "are damaged"),
        ({}, "does not say where"),
        ("{", "are damaged"),
        (DEEP.decode(), "are damaged"),
    ],
)
def test_stored_tensors_of_wrong_offsets_is_refused_before_anything_is_allocated(tmp_path, places, words):
    path = tmp_path / "dist_ckpt" / "shard-00001-model-00001-of-00001.safetensors"
    _shard(path, places)
    with pytest.raises(CheckpointError, match=words) as caught:
        stored_tensors(path.parent)
    assert path.name in str(caught.value) or "model.a" in str(caught.value)


def test_stored_tensors_of_a_covered_tensor_is_taken_and_a_second_copy_refused(tmp_path):
    folder = tmp_path / "dist_ckpt"
    for number, at in enumerate((0, 2, 4)):
        _shard(folder / f"{number}.safetensors", {"model.a": {"saved_offsets": [at, 0]}})
    assert stored_tensors(folder)["model.a"].shape == (6, 4)
    _shard(folder / "3.safetensors", {"model.a": {"saved_offsets": [4, 0]}})
    with pytest.raises(CheckpointError, match=r"3.safetensors can't be read: another file holds the same shard"):
        stored_tensors(folder)


def test_shards_with_a_second_copy_and_a_hole_are_refused_by_the_rank_that_reads_the_hole(tmp_path):
    folder = tmp_path / "dist_ckpt"
    for number, at in enumerate((0, 0, 4)):
        _shard(folder / f"{number}.safetensors", {"model.a": {"saved_offsets": [at, 0]}})
    with on_fake_ranks(3, rank=1):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
        own = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)], src_data_rank=None)
        stored = stored_tensors(folder, overlapping({"a": own}))
        with pytest.raises(CheckpointError, match="do not make up whole tensors: model.a"):
            read_shards(stored, {"model.a": own})


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hostname", "a/../../b.safetensors", "", 3, None, ["a"]])
def test_open_checkpoint_whose_index_names_files_elsewhere_is_refused(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(SettingError, match=r"index.json can't be read: .*(outside of the folder|no name of a file)"):
        safetensors_reader.open_checkpoint(folder)
    index.write_bytes(b'{"weight_map":' + DEEP)
    with pytest.raises(SettingError, match=r"index.json can't be read: RecursionError"):
        safetensors_reader.open_checkpoint(folder)


@pytest.mark.parametrize(
    "manifest",
    [
        {"format": FORMAT, "files": {"../secret": {"bytes": 6, "crc32": 0}}},
        {"format": FORMAT, "files": {"/etc/hostname": {"bytes": 6, "crc32": 0}}},
        {"format": FORMAT, "files": {"a": {"bytes": "6", "crc32": 0}}},
        {"format": FORMAT, "files": {"a": {"bytes": 6}}},
        {"format": FORMAT, "files": {"a": None}},
        {"format": FORMAT, "files": 3},
        {"format": "two", "files": {}},
        {"format": FORMAT},
        [],
        DEEP.decode(),
    ],
)
def test_verify_files_with_a_malformed_manifest_is_refused(tmp_path, manifest):
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / MANIFEST).write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is damaged"):
        verify_files(folder)


@pytest.mark.parametrize(
    "change",
    [{"step": None}, {"step": "1"}, {"lr_scheduler": 3}, {"param_groups": 3}, {"param_groups": [3]}]
    + [{"lora": lora} for lora in (3, {}, {"rank": 0, "alpha": 1}, {"rank": "8", "alpha": 1}, {"rank": 8})],
)
def test_read_facts_of_a_malformed_trainer_state_is_refused(tmp_path, change):
    state = {"step": 1, "lr_scheduler": None, "param_groups": None, "lora": None}
    (tmp_path / STATE).write_text(json.dumps(state))
    assert read_facts(tmp_path) == state
    (tmp_path / STATE).write_text(json.dumps(state | change))
    with pytest.raises(CheckpointError, match=f"{STATE} is damaged"):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"r": r} for r in ("8", True, None)]
    + [{"lora_alpha": "x"}, {"target_modules": 3}, {"target_parameters": [3]}, 3, "{"],
)
def test_lora_settings_of_a_malformed_adapter_config_are_refused(tmp_path, change):
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    model = {"lora_rank": 8, "lora_adapter_path": str(tmp_path)}
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(config))
    assert LoraSettings.of(model, "model").rank == 8
    changed = config | change if isinstance(change, dict) else change
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(SettingError, match=r"adapter_config.json is damaged"):
        LoraSettings.of(model, "model")


def test_copy_files_of_a_folder_with_links_copies_its_own_files_alone(tmp_path):
    (tmp_path / "secret").write_text("secret")
    folder, out = tmp_path / "huggingface", tmp_path / "out"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "same.json").symlink_to("config.json")
    (folder / "model.safetensors").symlink_to("config.json")
    copy_files(folder, out, "*.safetensors*")
    assert {path.name for path in out.iterdir()} == {"config.json", "same.json", "sub"}
    (folder / "sub" / "notes.txt").symlink_to("../../secret")
    with pytest.raises(CheckpointError, match=r"links to files outside of it: .*notes.txt"):
        copy_files(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def _config_with(folder: Path, **entries) -> Path:
    path = save_qwen3_moe(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return path


@pytest.mark.parametrize("name", ["_attn_implementation", "_experts_implementation", "attn_implementation"])
def test_model_config_that_names_a_kernel_of_the_hub_is_refused(tmp_path, name):
    _config_with(tmp_path / "model", **{name: "stranger/kernel"})
    with pytest.raises(SettingError, match="a repository of kernels, which would be run"):
        config_of(str(tmp_path / "model"))
    if name == "attn_implementation":  # an argument wins over it
        inspect_model({"path": str(tmp_path / "model")})
        return
    with pytest.raises(SettingError, match="a repository of kernels, which would be run"):
        inspect_model({"path": str(tmp_path / "model")})


def test_model_config_with_code_beside_it_runs_none_of_it(tmp_path):
    ran = tmp_path / "ran"
    folder = _config_with(tmp_path / "model", model_type="own", auto_map={"AutoConfig": "code.Config"}).parent
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')\nfrom transformers import PretrainedConfig as Config\n")
    with pytest.raises((ValueError, SettingError)):
        config_of(str(folder))
    with pytest.raises(SettingError, match="contains custom code"):
        inspect_model({"path": str(folder)})
    assert not ran.exists()
