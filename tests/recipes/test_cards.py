"""Resolution of a model's name on the command line to a config."""

import io
import json
import time
from urllib.error import URLError

import pytest
from huggingface_hub import constants
from transformers import Qwen3MoeConfig

from epfsdp2.engine.errors import SettingError
from epfsdp2.recipes import plan_sync
from epfsdp2.recipes.plan import cards
from epfsdp2.recipes.plan import cli as plan


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Replace the network: record the requests to the hub, and answer with an error or a config."""
    asked, answer = [], [URLError("Name or service not known")]

    def urlopen(request, timeout):
        asked.append((request.full_url, timeout))
        if isinstance(answer[0], Exception):
            raise answer[0]
        return io.BytesIO(json.dumps(answer[0]).encode())

    monkeypatch.setattr(cards, "urlopen", urlopen)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return asked, answer


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"])
def test_config_of_known_model_asks_nobody(name, hub):
    assert cards.config_of(name).num_experts == 128
    assert hub[0] == []


def test_config_of_folder_wins_over_known_model(tmp_path, monkeypatch, hub):
    Qwen3MoeConfig(num_experts=6).save_pretrained(tmp_path / "Qwen3-30B-A3B")
    monkeypatch.chdir(tmp_path)
    assert cards.config_of("Qwen3-30B-A3B").num_experts == 6


def test_config_of_hub_model_is_one_request(hub):
    asked, answer = hub
    answer[0] = Qwen3MoeConfig(num_experts=6).to_dict()
    assert cards.config_of("some/model").num_experts == 6
    assert asked == [("https://huggingface.co/some/model/resolve/main/config.json", 5.0)]


@pytest.mark.parametrize("recipe, sizes", [(plan, []), (plan_sync, ["--world", "8"])], ids=["plan", "plan_sync"])
def test_recipes_without_network_ask_once_and_say_so_in_one_paragraph(recipe, sizes, hub, capsys):
    started = time.monotonic()
    assert recipe.main(["--model", "some/Qwen3-40B", *sizes]) == 1
    assert len(hub[0]) == 1 and time.monotonic() - started < 5
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(
        "--model=some/Qwen3-40B: is not known here and not in the hub's cache, and the hub could not"
    )
    assert "Name or service not known" in said and "What works: a folder with config.json, or Qwen3-30B-A3B" in said


def test_config_of_hub_model_offline_asks_nobody(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SettingError, match="HF_HUB_OFFLINE is set"):
        cards.config_of("some/model")
    assert hub[0] == []
