"""A folder's weight files are those that transformers reads, or a refusal names both sets."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from epfsdp2.engine.checkpoint.safetensors_reader import check_files, open_checkpoint
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.model import check_model_path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def _write(folder: Path, **files: dict[str, float]) -> None:
    """Write each file with tensors of one value; ``model_1`` and ``model_2`` are the shards."""
    names = dict(zip(("model_1", "model_2"), SHARDS, strict=True))
    for name, tensors in files.items():
        path = folder / names.get(name, f"{name}.safetensors")
        save_file({key: torch.full((2,), value) for key, value in tensors.items()}, path)


def _index(folder: Path, **file_of: int) -> None:
    weight_map = {key: SHARDS[shard - 1] for key, shard in file_of.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _read(folder: Path) -> dict[str, float]:
    files = open_checkpoint(folder)
    return {key: files.read(key)[0].item() for key in sorted(files.file_of)}


def _refusal(folder: Path) -> str:
    """Return the driver's error, which the ranks' equals but for the setting's name."""
    with pytest.raises(SettingError) as on_rank:
        check_files(open_checkpoint(folder))
    with pytest.raises(SettingError) as error:
        check_model_path({"path": str(folder)}, "critic.model")
    assert error.value.rule == on_rank.value.rule and "\n" not in str(error.value)
    assert str(error.value).startswith(f"critic.model.path={folder}: ")
    return error.value.rule


def test_open_checkpoint_of_a_single_file_beside_another_set_of_the_index_names_both(tmp_path):
    _write(tmp_path, model={"a": 1.0, "b": 2.0}, model_1={"a": 3.0}, model_2={"b": 4.0})
    _index(tmp_path, a=1, b=2)
    rule = _refusal(tmp_path)
    assert f"{SINGLE}, which transformers reads" in rule and f"{SHARDS[0]} of its index" in rule
    (tmp_path / INDEX).unlink()  # and the shards are strays
    assert _read(tmp_path) == {"a": 1.0, "b": 2.0} and open_checkpoint(tmp_path).unread == tuple(SHARDS)


def test_open_checkpoint_of_an_index_of_the_single_file_reads_it(tmp_path):
    _write(tmp_path, model={"a": 1.0})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": SINGLE}}))
    assert _read(tmp_path) == {"a": 1.0} and open_checkpoint(tmp_path).unread == ()


def test_open_checkpoint_of_a_config_that_names_other_weights_names_them(tmp_path):
    _write(tmp_path, model={"a": 1.0}, other={"a": 2.0})
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "other.safetensors"}))
    assert "transformers_weights=other.safetensors, which transformers reads" in _refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": SINGLE}))
    assert _read(tmp_path) == {"a": 1.0}


@pytest.mark.parametrize("has_index", [True, False])
def test_open_checkpoint_of_a_tensor_in_two_files_names_both(tmp_path, has_index):
    _write(tmp_path, model_1={"a": 1.0, "b": 2.0}, model_2={"b": 3.0, "c": 4.0})
    if has_index:
        _index(tmp_path, a=1, b=1, c=2)
    assert f"b stands in two of its files, {SHARDS[0]} and {SHARDS[1]}" in _refusal(tmp_path)


def test_open_checkpoint_of_an_index_without_some_tensors_or_with_others_reads_as_transformers_does(tmp_path):
    _write(tmp_path, model_1={"a": 1.0, "left_out": 5.0}, model_2={"b": 2.0})
    _index(tmp_path, a=1, b=2)
    assert _read(tmp_path) == {"a": 1.0, "b": 2.0, "left_out": 5.0}
    _index(tmp_path, a=2, b=1)
    check_files(open_checkpoint(tmp_path))
    assert _read(tmp_path) == {"a": 1.0, "b": 2.0, "left_out": 5.0}


@pytest.mark.parametrize("has_index", [True, False])
def test_open_checkpoint_leaves_out_and_names_what_transformers_does_not_read(tmp_path, has_index):
    strays = ["adapter_model", "consolidated", "model.fp16", "optimizer"]
    _write(tmp_path, **{name: {"a": 9.0, "of_another": 9.0} for name in strays})
    if has_index:
        _write(tmp_path, model_1={"a": 1.0}, model_2={"b": 2.0})
        _index(tmp_path, a=1, b=2)
    else:
        _write(tmp_path, model={"a": 1.0, "b": 2.0})
    (tmp_path / "pytorch_model.bin").write_bytes(b"older")
    (tmp_path / "training_args.bin").write_bytes(b"no weights")
    (tmp_path / "original").mkdir()
    _write(tmp_path / "original", model={"a": 9.0})
    assert _read(tmp_path) == {"a": 1.0, "b": 2.0}
    assert open_checkpoint(tmp_path).unread == (*(f"{name}.safetensors" for name in strays), "pytorch_model.bin")


@pytest.mark.parametrize("has_index", [True, False])
def test_open_checkpoint_reads_what_from_pretrained_reads(tmp_path, has_index):
    """The rule about files is transformers' own: its function chooses the same."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files as resolve

    _write(
        tmp_path, **{"model" if not has_index else "consolidated": {"a": 1.0}}, model_1={"b": 2.0}, model_2={"c": 3.0}
    )
    if has_index:
        _index(tmp_path, b=1)
    read, _ = resolve(str(tmp_path), None, None, None, None, False)
    tensors = {key: value[0].item() for path in read for key, value in load_file(path).items()}
    assert _read(tmp_path) == tensors
