"""Checkpoints that bring code of their own, as Moonlight, Kimi-K2 and Ling do: what is loaded of them, and what not."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3ForCausalLM

from epfsdp2.engine.build import shard_and_load
from epfsdp2.engine.checkpoint.safetensors_reader import open_checkpoint
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.preflight.model import inspect_model
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.parity import families
from tests.support.models.tiny import VOCAB, relative_error
from tests.support.ranks import run_ranks

# As in the config.json of moonshotai/Moonlight-16B-A3B, moonshotai/Kimi-K2-Instruct and inclusionAI/Ling-mini-2.0.
DEEPSEEK = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
BAILING = {
    "AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config",
    "AutoModel": "modeling_bailing_moe_v2.BailingMoeV2Model",
    "AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM",
}
# Such code keeps experts in a list, where no engine can stack them.
CONFIGURATION = """
from transformers import Qwen3Config

class DeepseekV3Config(Qwen3Config):
    model_type = "deepseek_v3"
"""
MODELING = """
from torch import nn
from transformers import Qwen3ForCausalLM

from .configuration_deepseek import DeepseekV3Config

class DeepseekV3MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4))

class DeepseekV3ForCausalLM(Qwen3ForCausalLM):
    config_class = DeepseekV3Config

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp = DeepseekV3MoE(config)
"""


def _checkpoint(folder: Path, model_type: str, auto_map: dict[str, str]) -> Path:
    families.save("deepseek_v3", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_deepseek.py").write_text(CONFIGURATION)
    (folder / "modeling_deepseek.py").write_text(MODELING)
    return folder


def _loaded_equals_the_plain_model(folder: Path) -> None:
    plain = families.load("deepseek_v3", folder)
    config = AutoConfig.from_pretrained(folder)
    assert config.auto_map and type(config).__module__.startswith("transformers.")
    model = build_on_meta(AutoModelForCausalLM, config, torch.float32)
    assert type(model) is DeepseekV3ForCausalLM
    meshes = build_meshes("cpu", Topology.arrange(2, 2))
    options = ShardingOptions(param_dtype=torch.float32)
    shard_and_load(model, open_checkpoint(folder), meshes, options, device="cpu", device_id="cpu")
    ids = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
    mine = ids[dist.get_rank() :][:1]
    assert relative_error(families.logits(model.eval(), mine), families.logits(plain.eval(), mine)) < 1e-5


def test_remote_code_of_a_family_that_transformers_has_is_not_run(tmp_path):
    folder = _checkpoint(tmp_path / "moonlight", "deepseek_v3", DEEPSEEK)
    facts = inspect_model({"path": str(folder)})
    assert facts is not None and type(facts.model) is DeepseekV3ForCausalLM and set(facts.experts) == {8}
    run_ranks(_loaded_equals_the_plain_model, 2, folder)


def test_remote_code_that_keeps_experts_in_a_list_is_refused_with_what_works(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = _checkpoint(tmp_path / "moonlight", "deepseek_v3", DEEPSEEK)
    with pytest.raises(SettingError, match="keeps its experts in DeepseekV3MoE") as error:
        inspect_model({"path": str(folder), "trust_remote_code": True})
    assert "a copy of the folder whose config.json has no auto_map" in str(error.value)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "auto_map"}))
    facts = inspect_model({"path": str(folder), "trust_remote_code": True})
    assert facts is not None and type(facts.model) is DeepseekV3ForCausalLM


@pytest.mark.parametrize(
    ("model_type", "auto_map", "works"),
    [
        ("kimi_k2", DEEPSEEK, '"model_type": "deepseek_v3"'),
        ("bailing_moe", BAILING, "a module of your own"),
    ],
)
def test_remote_code_of_a_family_that_transformers_has_not_is_refused_with_what_works(
    tmp_path, model_type, auto_map, works
):
    folder = _checkpoint(tmp_path / model_type, model_type, auto_map)
    with pytest.raises(SettingError, match="contains custom code|model type") as error:
        inspect_model({"path": str(folder)})
    assert works in str(error.value).partition("What works:")[2]


def test_inspect_model_of_kimi_k2_with_the_advised_model_type_works(tmp_path):
    folder = _checkpoint(tmp_path / "kimi", "kimi_k2", DEEPSEEK)
    text = (folder / "config.json").read_text().replace('"kimi_k2"', '"deepseek_v3"')
    (folder / "config.json").write_text(text)
    facts = inspect_model({"path": str(folder)})
    assert facts is not None and type(facts.model) is DeepseekV3ForCausalLM
