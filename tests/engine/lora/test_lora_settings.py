"""Adapter settings that a run accepts or refuses on the driver."""

import json
from pathlib import Path

import pytest
import torch
import verl.trainer.config
from omegaconf import OmegaConf
from safetensors.torch import save_file

from epfsdp2.engine.config import EPFSDP2EngineConfig
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.lora.settings import _OF_MEGATRON, _READ_ELSEWHERE
from epfsdp2.engine.preflight.run import check_training
from tests.support.engine.lora import SETTINGS
from tests.support.models.tiny import save_qwen3_moe


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_qwen3_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture
def checked(folder, tmp_path):
    """Return ``check_training`` for a run with adapters, with changes to verl's model settings."""
    (tmp_path / "adapter").mkdir()
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_dora": False}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))

    def check(changes=None, setting="actor_rollout_ref.model", optim=None, **engine):
        model = {"path": str(folder), "override_config": {"attn_implementation": "sdpa"}, **SETTINGS, **(changes or {})}
        model.pop("engine", None)
        model = {
            key: value.replace("$", str(tmp_path)) if isinstance(value, str) else value for key, value in model.items()
        }
        return check_training(EPFSDP2EngineConfig(**engine), 8, model, device="cpu", setting=setting, optim=optim)

    return check


def test_lora_check_accepts_a_run_that_works(checked):
    assert checked().name == "Qwen3MoeForCausalLM"
    assert checked(ep_size=8, fsdp_size=8) is not None
    assert checked({"target_modules": None, "target_parameters": ["experts.down_proj"]}) is not None
    assert checked({"target_modules": r".*self_attn\.[qv]_proj"}) is not None
    assert checked({"lora_rank": 0}) is not None
    assert checked(setting="critic.model") is not None
    assert checked({"lora": {"modules_to_save": ["lm_head"]}}) is not None
    muon = {"optimizer": "Muon", "optimizer_impl": "torch.optim", "lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    assert checked(optim=muon, router_aux_loss_coef=0.1) is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_modules": ["qproj"]}, "target_modules=['qproj']: qproj matches no linear of a layer"),
        ({"target_modules": "q_proj"}, "target_modules=q_proj: q_proj matches no linear of a layer"),
        ({"target_modules": ["lm_head"]}, "target_modules=['lm_head']: lm_head matches no linear of a layer"),
        ({"target_modules": ["up_proj"]}, "target_modules=['up_proj']: model.layers.0.mlp.experts.gate_up_proj is"),
        ({"target_modules": None}, "target_modules=null: neither this nor target_parameters"),
        ({"target_parameters": ["experts.w1"]}, "target_parameters=['experts.w1']: experts.w1 matches no"),
        ({"exclude_modules": ["x_proj"]}, "exclude_modules=['x_proj']: x_proj matches no"),
        ({"exclude_modules": ".*"}, "exclude_modules=.*: it excludes all weights"),
        ({"lora_rank": -1}, "lora_rank=-1: has to be an integer"),
        ({"lora_rank": 2.0}, "lora_rank=2.0: has to be an integer"),
        ({"lora_alpha": 0}, "lora_alpha=0: has to be a positive number"),
        ({"lora": {"rank": 8}}, "lora.rank=8: is verl's setting for Megatron"),
        ({"lora_adapter_path": "/no/such"}, "lora_adapter_path=/no/such: it holds no adapter_config.json"),
        ({"lora_adapter_path": "$/adapter"}, "lora_adapter_path=$/adapter: it holds no adapter_model.safetensors"),
        ({"lora_adapter_path": "$/adapter", "lora_rank": 0}, "lora_rank=0: differs from the rank of"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout=0.1: is verl's setting for Megatron's adapters. What works: actor"),
        ({"lora": {"adapter_path": "/x"}}, "lora.adapter_path=/x: is verl's setting for Megatron's adapters."),
        (
            {"lora": {"use_rslorra": True}},
            "no such setting of adapters. What works: actor_rollout_ref.model.lora.use_rslo",
        ),
        ({"lora": {"use_dora": "yes"}}, "lora.use_dora=yes: is true or false"),
        ({"lora": {"type": "canonical_lora"}}, "lora.type=canonical_lora: is one of lora; dora"),
        ({"lora": {"rank_pattern": {"q_proj": 0}}}, "maps patterns of names to an integer of at least 1"),
        ({"lora": {"alpha_pattern": {"(": 1}}}, "maps patterns of names to a positive number"),
        ({"lora": {"layers_to_transform": [1]}}, "lora.layers_to_transform=[1]: narrows a list"),
        ({"target_modules": ["q_proj"], "lora": {"layers_to_transform": [7]}}, "these layers have none of the weights"),
        ({"lora": {"modules_to_save": ["lm_heads"]}}, "lm_heads names no module. What works: some of ['lm_head'"),
        ({"lora": {"modules_to_save": ["self_attn"]}}, "has modules with weights inside"),
        ({"lora": {"modules_to_save": ["experts"]}}, "is a stack of experts"),
        ({"lora": {"use_dora": True}}, "peft has DoRA for linears alone, and model.layers.0.mlp.experts"),
        (
            {"lora": {"modules_to_save": ["lm_head"]}, "use_fused_kernels": True},
            "lora.modules_to_save=['lm_head']: verl's fused kernels read the head's weight",
        ),
        (
            {"lora": {"modules_to_save": ["norm"]}, "engine": {"compile_dense": True}},
            "lora.modules_to_save=['norm']: its modules exchange their weights in a forward",
        ),
        (
            {"engine": {"experts_backend": "transformers:grouped_mm"}},
            "transformers:grouped_mm: adds no adapter",
        ),
        (
            {"lora_rank": 6, "engine": {"expert_shard_dim": 1}},
            "engine.expert_shard_dim=1: an expert weight has size 6 along this dim",
        ),
    ],
)
def test_lora_check_refuses_bad_settings(checked, tmp_path, changes, said):
    with pytest.raises(SettingError) as caught:
        checked(changes, **changes.get("engine", {}))
    assert said.replace("$", str(tmp_path)) in str(caught.value)


def test_lora_check_takes_verls_defaults_and_knows_each_of_them(checked):
    path = Path(verl.trainer.config.__file__).parent / "model" / "hf_model.yaml"
    lora = OmegaConf.to_container(OmegaConf.load(path).lora)
    assert checked({"lora": lora | {"merge": True, "fully_sharded_loras": True}}) is not None
    assert {name: lora[name] for name in lora.keys() - set(_READ_ELSEWHERE)} == _OF_MEGATRON


def test_lora_check_refuses_an_adapter_of_another_kind(checked, tmp_path):
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.1}))
    with pytest.raises(SettingError, match="its lora_dropout is 0.1"):
        checked({"lora_adapter_path": "$/adapter"})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.0}))
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(1)}, path.with_name("adapter_model.safetensors"))
    with pytest.raises(SettingError, match="q_proj.lora_A.weight is missing"):
        checked({"lora_adapter_path": "$/adapter"})
