"""A model's folder, its config and its experts, as far as they can be judged before a worker starts."""

import json
import logging

import pytest

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight import model_facts
from epfsdp2.engine.preflight.model_facts import inspect_model
from epfsdp2.engine.preflight.run import check_training
from tests.support.trainer.preflight import MODEL, SDPA, paragraph
from tests.support.trainer.settings import checkpoint, engine


@pytest.mark.parametrize(
    "kind, experts",
    [
        ("jetmoe", "JetMoeParallelExperts"),
        ("longcat_flash", "LongcatFlashExperts"),
        ("aria_text", "AriaGroupedExpertsGemm"),
    ],
)
def test_inspect_model_of_experts_outside_the_interface_refuses_their_class(tmp_path, kind, experts):
    settings = {"num_layers": 1} if kind == "longcat_flash" else {}
    settings |= {"num_hidden_layers": 2}
    model = checkpoint(tmp_path, kind, **settings)
    with pytest.raises(SettingError, match="outside transformers' experts interface") as caught:
        inspect_model(model)
    text = paragraph(caught.value, f"{MODEL}.path", model["path"])
    assert experts in text and "Attention" not in text and "Norm" not in text


@pytest.mark.parametrize("path", ["/no/such/model", "~/no-such-model", "./no/such", "a/b/c"])
def test_inspect_model_of_a_path_that_is_not_there_is_refused(path):
    with pytest.raises(SettingError, match="there is no such folder") as caught:
        inspect_model({"path": path})
    paragraph(caught.value, f"{MODEL}.path", path)


def test_inspect_model_of_a_folder_without_safetensors_is_refused(tmp_path, model):
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(SettingError, match="has no .*safetensors") as caught:
        inspect_model(model)
    paragraph(caught.value, f"{MODEL}.path", model["path"])


def test_inspect_model_of_an_index_with_missing_shards_is_refused(tmp_path, model):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SettingError, match="model-00002.safetensors, which is not there"):
        inspect_model(model)


@pytest.mark.parametrize("path", ["hdfs://host/model", "no-such-org/no-such-model-123"])
def test_check_training_of_a_model_that_is_not_local_is_skipped_with_a_warning(path, caplog):
    with caplog.at_level(logging.WARNING, "epfsdp2"):
        assert check_training(engine(), 2, {"path": path} | SDPA, device="cpu") is None
    assert [record.getMessage() for record in caplog.records] == [
        f"epfsdp2: {MODEL}.path={path} is not on this machine yet, so it is not checked"
    ]
    with pytest.raises(SettingError, match="number of ranks"):
        check_training(engine(ep_size=3), 8, {"path": path}, device="cpu")
    # Settings that do not depend on the model are still checked.
    with pytest.raises(SettingError, match="needs an accelerator"):
        check_training(engine(), 2, {"path": path}, device="cpu")


def test_inspect_model_of_a_hub_id_in_the_cache_checks_it(tmp_path, model, monkeypatch):
    monkeypatch.setattr(model_facts, "try_to_load_from_cache", lambda path, name: str(tmp_path / name))
    assert inspect_model({"path": "some-org/some-model"}).experts == (8, 8)


def test_inspect_model_of_a_config_that_transformers_can_not_build_is_refused(tmp_path, model):
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_type"}))
    with pytest.raises(SettingError, match="transformers can't build") as caught:
        inspect_model(model)
    paragraph(caught.value, f"{MODEL}.path", model["path"])
    (tmp_path / "config.json").unlink()
    with pytest.raises(SettingError, match="transformers can't build"):
        inspect_model(model)
