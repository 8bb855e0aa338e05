"""verl's optimizer settings: checked on the driver, and built into a MultiOptimizer."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.optim.multi_optimizer import optimizer_from_config
from epfsdp2.engine.optim.muon import Muon
from epfsdp2.engine.optim.settings import _arguments_by_verl, check_optimizer
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks

SETTING = "actor_rollout_ref.actor.optim"
OVERRIDES, MUON = "override_optimizer_config", {"optimizer": "Muon"}


def _config(**fields):
    defaults = {"lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.95], "optimizer": "AdamW"}
    return SimpleNamespace(**{**defaults, "optimizer_impl": "torch.optim", OVERRIDES: None, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"optimizer": "SGD", OVERRIDES: {"momentum": 0.9}},
        {OVERRIDES: {"fused": False, "eps": 1e-6}},
        MUON,
        {**MUON, OVERRIDES: {"momentum": 0.9, "ns_steps": 3, "adamw": {"eps": 1e-6}}},
        {**MUON, OVERRIDES: {"adjust_lr_fn": "original", "adamw": {"lr": 3e-4}}},
    ],
)
def test_check_optimizer_accepts_settings_that_work(fields):
    check_optimizer(_config(**fields), SETTING)
    check_optimizer(vars(_config(**fields)), SETTING)
    check_optimizer(OmegaConf.create(vars(_config(**fields))), SETTING)


@pytest.mark.parametrize(
    ("fields", "setting", "said"),
    [
        ({"optimizer": "adamw"}, "optimizer", "optimizer=AdamW"),
        ({"optimizer": "AdamWW"}, "optimizer", "AdamW"),
        ({"optimizer": "LBFGS"}, "optimizer", "verl passes weight_decay to every optimizer"),
        ({"optimizer": "zzz"}, "optimizer", "torch.optim has no such optimizer"),
        ({"optimizer_impl": "no_such_package"}, "optimizer_impl", "can't be imported"),
        ({OVERRIDES: {"epss": 1}}, f"{OVERRIDES}.epss", f"{OVERRIDES}.eps="),
        ({OVERRIDES: {"eps": -1}}, "", "Invalid epsilon value"),
        ({"betas": [1.5, 0.9]}, "", "Invalid beta parameter"),
        ({"lr": -1.0}, "", "Invalid learning rate"),
        ({**MUON, OVERRIDES: {"momentun": 1}}, f"{OVERRIDES}.momentun", "momentum="),
        ({**MUON, OVERRIDES: {"weight_decay": 1}}, f"{OVERRIDES}.weight_decay", "no such"),
        ({**MUON, OVERRIDES: {"momentum": 2}}, "", "momentum has to be in"),
        ({**MUON, OVERRIDES: {"adamw": {"epps": 1}}}, f"{OVERRIDES}.adamw.epps", "adamw.eps="),
        ({**MUON, OVERRIDES: {"adamw": 3}}, f"{OVERRIDES}.adamw", "adamw.eps"),
        ({**MUON, "betas": [0.9, 1.5]}, "", "Invalid beta parameter"),
    ],
)
def test_check_optimizer_refuses_settings_with_one_that_works(fields, setting, said):
    with pytest.raises(SettingError) as error:
        check_optimizer(_config(**fields), SETTING)
    assert error.value.setting == (f"{SETTING}.{setting}" if setting else SETTING)
    assert said in str(error.value)


def _built_from_config(folder):
    model, _ = sharded_model(folder, 2, 2)
    overrides = {"momentum": 0.9, "adamw": {"eps": 1e-6}}
    multi = optimizer_from_config(model, _config(optimizer="Muon", override_optimizer_config=overrides), None)
    dense, muon = multi.optimizers["dense"], multi.optimizers["muon"]
    assert isinstance(dense, torch.optim.AdamW) and isinstance(muon, Muon)
    assert {group["weight_decay"] for group in multi.param_groups} == {0.01}
    assert {group["lr"] for group in multi.param_groups} == {1e-3}
    assert {(g["betas"], g["eps"], g["fused"]) for g in dense.param_groups} == {((0.9, 0.95), 1e-6, True)}
    assert {(g["momentum"], g["adjust_lr_fn"]) for g in muon.param_groups} == {(0.9, "match_rms_adamw")}
    held = [name for group in multi.state_dict()["param_groups"] for name in group["params"]]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())
    other = optimizer_from_config(model, _config(), torch.optim.AdamW)
    assert {type(o) for o in other.optimizers.values()} == {torch.optim.AdamW}
    assert list(other.optimizers) == ["dense", "experts"]


def test_optimizer_from_config_chooses_the_algorithms(tmp_path):
    run_ranks(_built_from_config, 2, save_qwen3_moe(tmp_path))


def test_optimizer_from_config_passes_arguments_as_verl_does():
    optimizer = pytest.importorskip("verl.workers.config.optimizer")
    for fields in ({}, {"optimizer": "SGD"}, {"optimizer": "RAdam", "override_optimizer_config": {"eps": 1e-6}}):
        config = optimizer.FSDPOptimizerConfig(**vars(_config(**fields)))
        built = optimizer.build_optimizer([nn.Parameter(torch.ones(1))], config)
        for key, value in _arguments_by_verl(config).items():
            got = built.defaults[key]
            assert (tuple(got) if key == "betas" else got) == value
