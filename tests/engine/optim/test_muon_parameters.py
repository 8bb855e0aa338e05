"""The parameters that Muon steps, their layouts, and the parameters left to AdamW."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma4TextConfig,
    JambaConfig,
    Qwen2MoeConfig,
)

from epfsdp2.engine.optim.muon_partition import Layout, muon_parameters
from tests.support.engine.muon import COMMON, CONFIGS, muon_model
from tests.support.ranks import run_ranks

# -- parameters -------------------------------------------------------------------------------------------------------

SMALL = {**COMMON, "hidden_size": 24, "num_hidden_layers": 2, "num_experts_per_tok": 2}


def _names(config):
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, muon_parameters(model)


def test_muon_parameters_of_qwen2_moe_leave_router_and_shared_expert_gate_out():
    config = Qwen2MoeConfig(**SMALL, num_experts=8, moe_intermediate_size=20, shared_expert_intermediate_size=22)
    model, found = _names(config)
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


def test_muon_parameters_of_gpt_oss_are_interleaved_and_leave_stacked_biases_out():
    _, found = _names(CONFIGS["gpt-oss"]())
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == Layout(parts=2, out_dim=-1, interleaved=True)
    assert found["model.layers.0.mlp.experts.down_proj"] == Layout(out_dim=-1)
    assert not any("bias" in name or "router" in name for name in found)


def test_muon_parameters_of_nemotron_h_have_one_part_and_leave_its_convolution_out():
    _, found = _names(CONFIGS["nemotron-h"]())
    assert found["model.layers.0.mixer.experts.up_proj"] == Layout()
    assert "model.layers.0.mixer.fc1_latent_proj.weight" in found and "model.layers.2.mixer.in_proj.weight" in found
    assert not any("conv1d" in name or ".gate." in name for name in found)


@pytest.mark.parametrize(
    ("config", "router"),
    [
        (
            DeepseekV2Config(
                **{k: v for k, v in SMALL.items() if k not in ("head_dim", "num_key_value_heads")},
                n_routed_experts=8,
                moe_intermediate_size=20,
                intermediate_size=26,
                first_k_dense_replace=1,
                kv_lora_rank=10,
                q_lora_rank=12,
                qk_nope_head_dim=6,
                qk_rope_head_dim=4,
                v_head_dim=6,
            ),
            "model.layers.1.mlp.gate.weight",
        ),
        (
            JambaConfig(
                **{k: v for k, v in SMALL.items() if k != "head_dim"},
                num_experts=8,
                intermediate_size=20,
                expert_layer_offset=1,
                expert_layer_period=2,
                attn_layer_offset=1,
                attn_layer_period=2,
                mamba_dt_rank=4,
                mamba_d_state=4,
            ),
            "model.layers.1.feed_forward.router.weight",
        ),
        (
            Gemma4TextConfig(
                **{**SMALL, "num_experts_per_tok": None},
                enable_moe_block=True,
                num_experts=8,
                top_k_experts=2,
                moe_intermediate_size=20,
                intermediate_size=26,
                global_head_dim=6,
                hidden_size_per_layer_input=0,
            ),
            "model.layers.1.router.proj.weight",
        ),
    ],
    ids=["deepseek-v2", "jamba", "gemma4"],
)
def test_muon_parameters_leave_routers_that_are_linears_out(config, router):
    model, found = _names(config)
    names = [name for name, _ in model.named_parameters()]
    assert router in names and router not in found
    assert any("experts.gate_up_proj" in name for name in found)
    assert any(name.endswith(("q_proj.weight", "q_b_proj.weight")) for name in found)
    assert not any(".experts." not in name and model.get_parameter(name).shape[0] == 8 for name in found)


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
