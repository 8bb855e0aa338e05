"""The small files of a base's folder and its config, as a save writes them."""

import json

import pytest
from transformers import AutoConfig

from epfsdp2.engine.model_files import folder_of, read_small_files, with_chat_template, with_dtype, with_overrides
from tests.parity.families import ALL

OLDER = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_own.OwnConfig"},
    "eos_token_id": [2, 3],
    "max_position_embeddings": 256,
    "num_nextn_predict_layers": 1,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
}


def _cached(root):
    """A hub's cache with a snapshot of links to blobs, as huggingface_hub makes it."""
    snapshot, blobs = root / "models--org--base/snapshots/0123", root / "models--org--base/blobs"
    for folder in (snapshot / "additional_chat_templates", blobs, root / "models--org--base/refs"):
        folder.mkdir(parents=True)
    (root / "models--org--base/refs/main").write_text("0123")
    files = {"config.json": "{}", "tokenizer.model": "pieces", "additional_chat_templates/tool_use.jinja": "tools"}
    for number, (name, content) in enumerate(files.items()):
        (blobs / str(number)).write_text(content)
        (snapshot / name).symlink_to(blobs / str(number))
    return snapshot


def test_read_small_files_of_a_hub_cache_reads_its_blobs_and_no_link_that_leads_further(tmp_path, caplog):
    snapshot = _cached(tmp_path)
    (tmp_path / "secret").write_text("secret")
    (snapshot / "notes.txt").symlink_to(tmp_path / "secret")
    wanted = {"tokenizer.model": b"pieces", "additional_chat_templates/tool_use.jinja": b"tools"}
    assert read_small_files(snapshot) == wanted
    assert "notes.txt" in caplog.text
    # The blobs of a folder that is no snapshot are not the model's.
    other = tmp_path / "a/b/model"
    other.mkdir(parents=True)
    (tmp_path / "a/blobs").mkdir()
    (tmp_path / "a/blobs/0").write_text("secret")
    (other / "vocab.txt").symlink_to(tmp_path / "a/blobs/0")
    assert read_small_files(other) == {}


def test_folder_of_a_hub_id_is_its_snapshot_in_the_cache(tmp_path, monkeypatch):
    snapshot = _cached(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert folder_of("org/base").resolve() == snapshot
    assert folder_of(str(tmp_path)) == tmp_path
    with pytest.raises(FileNotFoundError, match="org/other is no folder"):
        folder_of("org/other")


def _read(folder, fields):
    """Return the file of a config, and what transformers reads there."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder / "config.json", AutoConfig.from_pretrained(folder)


def test_with_overrides_keeps_the_fields_and_names_of_the_base_but_for_the_runs_own(tmp_path):
    file, trained = _read(tmp_path / "older", OLDER)
    trained.eos_token_id = 2  # by verl, of the tokenizer
    overrides = {"attn_implementation": "sdpa", "max_position_embeddings": 64, "torch_dtype": "float32"}
    wanted = {**OLDER, "num_nextn_predict_layers": 0, "max_position_embeddings": 64}
    assert with_overrides(file, overrides, trained) == wanted
    assert with_overrides(file, {"eos_token_id": 7}, trained)["eos_token_id"] == 7
    trained.tie_word_embeddings = True
    assert with_overrides(file, {}, trained)["tie_word_embeddings"] is True
    nested = {"model_type": "qwen3_vl_moe", "text_config": {"mtp_num_hidden_layers": 1, "rope_theta": 5.0}}
    file, trained = _read(tmp_path / "nested", nested)
    got = with_overrides(file, {"text_config": {"vocab_size": 64}}, trained)
    text = {"mtp_num_hidden_layers": 0, "rope_theta": 5.0, "vocab_size": 64}
    assert got == {**nested, "text_config": text}


@pytest.mark.parametrize("name", ALL)
def test_with_overrides_of_a_config_of_any_family_is_the_base(name, tmp_path):
    ALL[name].build().config.save_pretrained(tmp_path)
    file, trained = tmp_path / "config.json", AutoConfig.from_pretrained(tmp_path)
    assert with_overrides(file, {"attn_implementation": "sdpa"}, trained, has_mtp=True) == json.loads(file.read_text())


def test_with_dtype_changes_each_dtype_that_a_config_has_under_its_own_name():
    config = {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "vocab_size": 3}, "id2label": {"0": "a"}}
    wanted = {"torch_dtype": "float32", "text_config": {"dtype": "float32", "vocab_size": 3}, "id2label": {"0": "a"}}
    assert with_dtype(config, "float32") == wanted


def test_with_chat_template_replaces_it_wherever_the_base_has_one():
    tokenizer = json.dumps({"eos_token": "</s>", "chat_template": "old"}).encode()
    files = {
        "additional_chat_templates/tool_use.jinja": b"old",
        "chat_template.jinja": b"old",
        "chat_template.json": b"old",
        "tokenizer.model": b"pieces",
        "tokenizer_config.json": tokenizer,
    }
    changed = with_chat_template(files, "new")
    assert changed.keys() == {"chat_template.jinja", "tokenizer.model", "tokenizer_config.json"}
    assert changed["chat_template.jinja"] == b"new" and changed["tokenizer.model"] == b"pieces"
    assert json.loads(changed["tokenizer_config.json"]) == {"eos_token": "</s>"}
