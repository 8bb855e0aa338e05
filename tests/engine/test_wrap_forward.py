"""Forwards of modules are replaced in one order, whatever a run asks for."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from epfsdp2.engine.fsdp.activation_checkpoint import checkpoint_layers
from epfsdp2.engine.fsdp.compile import compile_dense_parts
from epfsdp2.engine.moe.find import find_experts
from epfsdp2.engine.moe.router.losses import RouterLosses
from epfsdp2.engine.moe.router.replay import RouterReplay
from epfsdp2.engine.moe.shared_experts import SharedExperts
from epfsdp2.engine.wrap_forward import ORDER, wrap_forward, wrapped_by


def test_wrap_forward_calls_the_last_wrapper_first():
    module = nn.Identity()
    calls = []
    for name in ("router_losses", "autocast"):
        wrap_forward(module, name, lambda forward, x, name=name: calls.append(name) or forward(x))
    assert module(3) == 3 and calls == ["autocast", "router_losses"]
    assert wrapped_by(module) == ("router_losses", "autocast") and type(module) is nn.Identity


@pytest.mark.parametrize("earlier", range(len(ORDER) - 1))
def test_wrap_forward_refuses_what_comes_too_late(earlier):
    module = nn.Identity()
    wrap_forward(module, ORDER[earlier + 1], lambda forward, x: forward(x) + 1)
    with pytest.raises(RuntimeError, match=f"{ORDER[earlier]} can't wrap the forward of Identity after"):
        wrap_forward(module, ORDER[earlier], lambda forward, x: forward(x) + 1)
    assert module(1) == 2 and wrapped_by(module) == (ORDER[earlier + 1],)
    with pytest.raises(ValueError, match="not in tuple"):
        wrap_forward(module, "dropout", lambda forward, x: forward(x))


def _glm():
    config = AutoConfig.for_model(
        "glm4_moe",
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
        vocab_size=64,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_wrap_forward_of_every_feature_wraps_in_the_listed_order():
    model = _glm()
    experts, layers = find_experts(model), list(model.model.layers)
    RouterLosses(model, experts, aux_coef=0.1)
    RouterReplay(model, experts, 2)
    for info in experts:
        SharedExperts(model.get_submodule(info.fqn.rpartition(".")[0]), info.module)
    modules = [info.module for info in experts]
    compile_dense_parts(layers, modules, backend="eager")
    checkpoint_layers(layers, modules, 4, "full")
    block, attention = layers[0].mlp, layers[0].self_attn
    assert wrapped_by(block) == ("router_losses", "router_replay", "shared_experts")
    assert wrapped_by(block.shared_experts) == ("shared_experts",)
    assert wrapped_by(attention) == ("compile",) and wrapped_by(layers[0]) == ("recompute",)
    with pytest.raises(RuntimeError, match="router_replay can't wrap"):
        RouterReplay(model, experts, 2)


def test_wrap_forward_of_a_compiled_and_recomputed_part_compiles_inside():
    model = _glm()
    layers, modules = list(model.model.layers), [info.module for info in find_experts(model)]
    compile_dense_parts(layers, modules, backend="eager")
    checkpoint_layers(layers, modules, 4, "selective")
    assert wrapped_by(layers[0].self_attn) == ("compile", "recompute")
