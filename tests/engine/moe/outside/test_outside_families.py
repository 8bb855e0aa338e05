"""Families outside transformers' experts interface: the forward in the place of theirs, and how a user adds one."""

import copy
import sys
import textwrap

import pytest
import torch
from torch import nn
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


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("name", families.OUTSIDE)
def test_outside_block_of_every_family_computes_what_the_familys_own_does(name, top_k):
    family = FAMILIES[name]
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


def test_outside_blocks_of_a_model_without_one_leave_it_unchanged():
    model = FAMILIES["qwen3_moe"].build()
    before = {name: type(module) for name, module in model.named_modules()}
    prepare(model)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert not any("forward" in vars(module) for module in model.modules())


MODULE = """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from torch import nn

    from epfsdp2.engine.moe.outside.blocks import Block
    from epfsdp2.engine.moe.outside.families import OUTSIDE


    class {name}Block(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.gate = nn.Linear(config.hidden_size, 6, bias=False)
            self.w_in = nn.Parameter(torch.randn(6, 2 * 20, config.hidden_size) / 7)
            self.w_out = nn.Parameter(torch.randn(6, config.hidden_size, 20) / 7)
            self.act = nn.SiLU()

        def route(self, hidden):
            weights, ids = self.gate(hidden).softmax(-1).topk(2)
            return ids, weights

        def forward(self, x):
            hidden = x.reshape(-1, x.shape[-1])
            ids, weights = self.route(hidden)
            gate, up = torch.einsum("td,eod->teo", hidden, self.w_in).chunk(2, -1)
            each = torch.einsum("teo,edo->ted", self.act(gate) * up, self.w_out)
            chosen = each.gather(1, ids[..., None].expand(-1, -1, each.shape[-1]))
            return (chosen * weights[..., None]).sum(1).view_as(x)


    class {name}Config(Qwen3Config):
        model_type = "{type}"


    class {name}ForCausalLM(Qwen3ForCausalLM):
        config_class = {name}Config

        def __init__(self, config):
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = {name}Block(config)


    AutoConfig.register("{type}", {name}Config)
    AutoModelForCausalLM.register({name}Config, {name}ForCausalLM)


    def _forward(self, x):
        hidden = x.reshape(-1, x.shape[-1])
        return self.experts(hidden, *self.route(hidden)).view_as(x)


    OUTSIDE["{name}Block"] = Block("w_in", "w_out", "act", _forward)
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_family.py").write_text(textwrap.dedent(MODULE.format(name="Users", type="users_family")))
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_family"
    sys.modules.pop("users_family", None)
    OUTSIDE.pop("UsersBlock", None)


def test_outside_family_of_a_users_own_module_is_checked_on_the_driver(tmp_path, users_module):
    folder = tmp_path / "model"
    settings = {"path": str(folder), "external_lib": "no_such_module"}
    AutoConfig.for_model("qwen3", vocab_size=64, hidden_size=HIDDEN, num_hidden_layers=2).save_pretrained(folder)
    nothing = nn.Linear(1, 1)
    assert not _blocks(nothing)
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingError, match=r"model.external_lib=no_such_module: it can't be imported"):
        inspect_model(settings)
    text = (folder / "config.json").read_text().replace('"qwen3"', '"users_family"')
    (folder / "config.json").write_text(text)
    facts = inspect_model(settings | {"external_lib": users_module})
    assert facts is not None and facts.name == "UsersForCausalLM" and facts.experts == (6, 6)


def test_outside_family_of_a_users_own_module_is_planned(tmp_path, users_module, capsys):
    config = AutoConfig.for_model("qwen3", vocab_size=64, hidden_size=HIDDEN, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"qwen3"', '"users_family"')
    (tmp_path / "config.json").write_text(text)
    words = ["--model", str(tmp_path), "--gpus", "2", "--tokens", "256"]
    assert plan([*words, "--external-lib", "no_such_module"]) == 1
    assert "model.external_lib=no_such_module: it can't be imported" in " ".join(capsys.readouterr().out.split())
    assert plan([*words, "--external-lib", users_module]) == 0
    text = capsys.readouterr().out
    assert "mesh: 2 ranks" in text and "no experts" not in text
