"""Families outside transformers' experts interface: the forward in the place of theirs, and how a user adds one."""

import copy
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.moe.find import UnsupportedModelError, find_experts, is_on_interface
from epfsdp2.engine.moe.outside.families import OUTSIDE, prepare
from epfsdp2.engine.preflight.model import inspect_model
from epfsdp2.recipes.plan.cli import main as plan
from tests.parity import families
from tests.parity.families import FAMILIES, own_values
from tests.support.models.tiny import relative_error

EXACT = 1e-12  # in float64; the largest seen is 2e-15
HIDDEN = 48


def _blocks(model):
    return {name: module for name, module in model.named_modules() if type(module).__name__ in OUTSIDE}


def _run(block, hidden):
    output = block(hidden)
    output = output[0] if isinstance(output, tuple) else output
    generator = torch.Generator().manual_seed(3)
    (output.reshape(-1) * torch.randn(output.numel(), dtype=output.dtype, generator=generator)).sum().backward()
    return output.detach().reshape(-1, HIDDEN)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("name", families.OUTSIDE)
def test_outside_block_of_every_family_computes_what_the_familys_own_does(name, top_k):
    family = families.ALL.get(name) or families.EVERY[name]  # a block of Llama 4 runs in 5.24, the model does not
    text = family.sizes.get("text_config", family.sizes) | {"num_experts_per_tok": top_k}
    if "ffn_config" in text:
        norm = 1.0 if top_k > 1 else None  # a single weight that is normalised has a gradient of zero
        text |= {"ffn_config": text["ffn_config"] | {"moe_top_k": top_k, "moe_normalize_expert_weights": norm}}
    plain = family.build_random("eager", **({"text_config": text} if "text_config" in family.sizes else text))
    model = copy.deepcopy(plain)
    prepare(model)
    model = copy.deepcopy(model)  # as the engine keeps one for the plan
    assert all(block.forward.__self__ is block for block in _blocks(model).values() if "forward" in vars(block))
    ours, theirs = _blocks(model), _blocks(plain)
    assert ours and ours.keys() == theirs.keys()
    if not any(map(is_on_interface, plain.modules())):  # transformers has put Granite there since
        assert len(find_experts(model)) == len(ours)
        with pytest.raises(UnsupportedModelError, match="outside transformers' experts interface"):
            find_experts(plain)
    for fqn, block in ours.items():
        hidden = torch.randn(2, 7, HIDDEN, dtype=torch.float64)
        mine, wanted = (hidden.clone().requires_grad_() for _ in range(2))
        assert relative_error(_run(block, mine), _run(theirs[fqn], wanted)) < EXACT
        assert relative_error(mine.grad, wanted.grad) < EXACT
        grads = own_values(model, {f"{fqn}.{n}": p.grad for n, p in theirs[fqn].named_parameters()})
        for own_name, param in block.named_parameters():
            assert relative_error(param.grad, grads[f"{fqn}.{own_name}"]) < EXACT, own_name


def test_outside_dbrx_whose_positions_transformers_would_misread_is_refused(tmp_path):
    config = FAMILIES["dbrx"].build().config
    path = families.save("dbrx", tmp_path)
    assert inspect_model({"path": str(path)}).experts == (8, 8, 8)
    config.attn_config.rope_theta = 5e5
    config.save_pretrained(path)
    with pytest.raises(SettingError, match=r"attn_config.rope_theta=500000.0 is not .*rope_theta=10000.0 with .*; set"):
        inspect_model({"path": str(path)})


MODULE = """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from torch import nn

    from epfsdp2.engine.moe.outside.blocks import Block
    from epfsdp2.engine.moe.outside.families import OUTSIDE


    class UsersBlock(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.gate = nn.Linear(config.hidden_size, 6, bias=False)
            self.w_in = nn.Parameter(torch.randn(6, 2 * 20, config.hidden_size) / 7)
            self.w_out = nn.Parameter(torch.randn(6, config.hidden_size, 20) / 7)
            self.act = nn.SiLU()


    class UsersConfig(Qwen3Config):
        model_type = "users_family"


    class UsersForCausalLM(Qwen3ForCausalLM):
        config_class = UsersConfig

        def __init__(self, config):
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = UsersBlock(config)


    AutoConfig.register("users_family", UsersConfig)
    AutoModelForCausalLM.register(UsersConfig, UsersForCausalLM)


    def _forward(self, x):
        hidden = x.reshape(-1, x.shape[-1])
        weights, ids = self.gate(hidden).softmax(-1).topk(2)
        return self.experts(hidden, ids, weights).view_as(x)


    OUTSIDE["UsersBlock"] = Block("w_in", "w_out", "act", _forward)
"""


def test_outside_family_of_a_users_own_module_is_checked_on_the_driver_and_planned(tmp_path, monkeypatch, capsys):
    (tmp_path / "users_family.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "model"
    AutoConfig.for_model("qwen3", vocab_size=64, hidden_size=HIDDEN, num_hidden_layers=2).save_pretrained(folder)
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"path": str(folder), "external_lib": "no_such_module"}
    with pytest.raises(SettingError, match=r"model.external_lib=no_such_module: it can't be imported"):
        inspect_model(settings)
    words = ["--model", str(folder), "--gpus", "2", "--tokens", "256", "--external-lib"]
    assert plan([*words, "no_such_module"]) == 1
    assert "model.external_lib=no_such_module: it can't be imported" in " ".join(capsys.readouterr().out.split())
    text = (folder / "config.json").read_text().replace('"qwen3"', '"users_family"')
    (folder / "config.json").write_text(text)
    try:
        facts = inspect_model(settings | {"external_lib": "users_family"})
        assert facts is not None and facts.name == "UsersForCausalLM" and facts.experts == (6, 6)
        assert plan([*words, "users_family"]) == 0
    finally:
        sys.modules.pop("users_family", None)
        OUTSIDE.pop("UsersBlock", None)
    text = capsys.readouterr().out
    assert "mesh: 2 ranks" in text and "no experts" not in text
