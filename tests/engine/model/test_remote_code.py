"""Checkpoints that bring code of their own, as Moonlight, Kimi-K2 and Ling do: what is loaded of them, and what not."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3ForCausalLM

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.preflight.model import inspect_model
from epfsdp2.recipes.dequantise import dequantise
from tests.parity import families


def _auto_map(module: str, name: str) -> dict[str, str]:
    kinds = {"AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    models = {auto: f"modeling_{module}.{name}{kind}" for auto, kind in kinds.items()}
    return {"AutoConfig": f"configuration_{module}.{name}Config", **models}


# As in the config.json of moonshotai/Moonlight-16B-A3B, moonshotai/Kimi-K2-Instruct and inclusionAI/Ling-mini-2.0.
DEEPSEEK, BAILING = _auto_map("deepseek", "DeepseekV3"), _auto_map("bailing_moe_v2", "BailingMoeV2")


class Published(NamedTuple):
    """Checkpoints with an ``auto_map``: what transformers or the driver makes of them.

    Args:
        refusal: a part of the driver's message about what works; empty if transformers' own class is used.
    """

    model_type: str
    auto_map: dict[str, str]
    works: str
    refusal: str = ""


_SINCE = "as it is, with transformers 5.23"
_COPY = 'what `recipes.dequantise` writes, or a copy whose config.json says `"model_type": "deepseek_v3"`'
_ALONE = "a module of your own"
PUBLISHED = {
    "Moonlight, DeepSeek-V3": Published("deepseek_v3", DEEPSEEK, "as it is, or without `auto_map`"),
    "Kimi-K2": Published("kimi_k2", DEEPSEEK, f"refused: {_COPY}", '"model_type": "deepseek_v3"'),
    "Kimi-K2.5, Kimi-K2.6": Published("kimi_k25", _auto_map("kimi_k25", "KimiK25"), "as it is, with transformers 5.24"),
    "Kimi-Linear": Published("kimi_linear", _auto_map("kimi", "KimiLinear"), _SINCE),
    "Ling 2.5": Published("bailing_hybrid", _auto_map("bailing", "BailingHybrid"), _SINCE),
    "Ling and Ring before": Published("bailing_moe", BAILING, f"refused: transformers has no class; {_ALONE}", _ALONE),
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
    families.save(model_type if model_type in families.ALL else "deepseek_v3", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": auto_map}
    if "text_config" in config:  # Kimi-K2.5's
        config["text_config"] |= {"model_type": "kimi_k2", "auto_map": DEEPSEEK}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_deepseek.py").write_text(CONFIGURATION)
    (folder / "modeling_deepseek.py").write_text(MODELING)
    return folder


def test_dequantised_kimi_k2_is_built_of_transformers_class_with_code_trusted_for_its_tokenizer(tmp_path):
    folder = _checkpoint(tmp_path / "kimi", "kimi_k2", DEEPSEEK)
    tensors, name = {}, "model.layers.0.self_attn.o_proj.weight"
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    dequantise(folder, tmp_path / "plain")
    facts = inspect_model({"path": str(tmp_path / "plain"), "trust_remote_code": True})
    assert facts is not None and type(facts.model) is DeepseekV3ForCausalLM and set(facts.experts) == {8}


def test_remote_code_of_a_family_that_transformers_has_is_not_run(tmp_path):
    folder = _checkpoint(tmp_path / "moonlight", "deepseek_v3", DEEPSEEK)
    facts = inspect_model({"path": str(folder)})
    assert facts is not None and type(facts.model) is DeepseekV3ForCausalLM and set(facts.experts) == {8}
    config = AutoConfig.from_pretrained(folder)
    assert config.auto_map and type(build_on_meta(AutoModelForCausalLM, config, torch.float32)) is DeepseekV3ForCausalLM


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoint_with_own_code_is_built_of_transformers_class_or_refused_with_what_works(tmp_path, name):
    model_type, auto_map, _, refusal = PUBLISHED[name]
    if not refusal and model_type not in families.ALL:
        pytest.skip(f"transformers has no {model_type}")
    folder = _checkpoint(tmp_path / model_type, model_type, auto_map)
    if refusal:
        with pytest.raises(SettingError, match="contains custom code|model type") as error:
            inspect_model({"path": str(folder)})
        assert refusal in str(error.value).partition("What works:")[2]
        return
    facts = inspect_model({"path": str(folder)})
    assert facts is not None and set(facts.experts) == {8}
    assert type(facts.model).__module__.startswith(f"transformers.models.{model_type}.")
