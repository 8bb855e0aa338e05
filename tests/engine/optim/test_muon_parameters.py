"""The parameters that Muon steps, their layouts, and the parameters left to AdamW."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from epfsdp2.engine.model.layers import set_mtp
from epfsdp2.engine.optim.muon_partition import Layout, muon_parameters
from tests.parity.families import FAMILIES
from tests.support.engine.muon import CONFIGS, muon_model
from tests.support.ranks import run_ranks


def test_muon_parameters_of_qwen2_moe_leave_router_and_shared_expert_gate_out():
    model = FAMILIES["qwen2_moe"].build()
    found = muon_parameters(model)
    layer = {name.removeprefix("model.layers.1.") for name in found if ".1." in name}
    assert layer == {
        *(f"self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    rest = {name for name, _ in model.named_parameters()} - found.keys()
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"} <= rest
    assert "model.layers.0.mlp.shared_expert_gate.weight" in rest and "model.layers.0.self_attn.q_proj.bias" in rest
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == Layout(parts=2)
    assert found["model.layers.0.mlp.experts.down_proj"] == Layout()


def test_muon_parameters_of_interleaved_and_of_ungated_experts_leave_biases_and_convolutions_out():
    found = {name: muon_parameters(muon_model(CONFIGS[name]())) for name in ("gpt-oss", "nemotron-h")}
    gpt_oss, nemotron = found["gpt-oss"], found["nemotron-h"]
    assert gpt_oss["model.layers.0.mlp.experts.gate_up_proj"] == Layout(parts=2, out_dim=-1, interleaved=True)
    assert gpt_oss["model.layers.0.mlp.experts.down_proj"] == Layout(out_dim=-1)
    assert nemotron["model.layers.0.mixer.experts.up_proj"] == Layout()
    assert {"model.layers.0.mixer.fc1_latent_proj.weight", "model.layers.2.mixer.in_proj.weight"} <= nemotron.keys()
    assert not any(part in name for name in gpt_oss for part in ("bias", "router"))
    assert not any(part in name for name in nemotron for part in ("conv1d", ".gate."))


@pytest.mark.parametrize(
    ("family", "router"),
    [("deepseek_v2", ".mlp.gate.weight"), ("jamba", ".feed_forward.router.weight"), ("gemma4", ".router.proj.weight")],
)
def test_muon_parameters_leave_routers_that_are_linears_out(family, router):
    model = FAMILIES[family].build()
    found = muon_parameters(model)
    routers = [name for name, _ in model.named_parameters() if name.endswith(router)]
    assert routers and not found.keys() & set(routers)
    assert any("experts.gate_up_proj" in name for name in found)
    assert any(name.endswith(("q_proj.weight", "q_b_proj.weight")) for name in found)


def test_muon_parameters_leave_heads_of_layers_that_draft_out():
    model = FAMILIES["qwen2_moe"].build()
    own = "model.layers.0.self_attn.o_proj"
    assert f"{own}.weight" in muon_parameters(model)
    set_mtp(model, ["model.layers.0"], heads=[own])
    assert f"{own}.weight" not in muon_parameters(model)


class _PlannedExperts(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(6, 4, 10), mesh, [Shard(1)]))


class _PlannedLayer(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.proj, self.gate, self.experts = nn.Linear(6, 6), nn.Linear(6, 4), _PlannedExperts(mesh)


def _a_plan_s_experts():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep_fsdp", "ep"))["ep"]
    model = nn.Sequential(_PlannedLayer(mesh))
    model._no_split_modules = ["_PlannedLayer"]
    assert list(muon_parameters(model)) == ["0.proj.weight"]


def test_muon_parameters_leave_planned_experts_and_their_router_to_adamw():
    run_ranks(_a_plan_s_experts, 2)


def test_muon_parameters_leave_frozen_parameters_out():
    model = muon_model(CONFIGS["qwen3"]())
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    assert "model.layers.0.mlp.experts.down_proj" not in muon_parameters(model)
