"""Forwards of modules are wrapped in one order, whatever the settings."""

import itertools

import pytest
import torch
from torch import nn

from epfsdp2.engine.fsdp.activation_checkpoint import checkpoint_layers
from epfsdp2.engine.fsdp.compile import compile_dense_parts
from epfsdp2.engine.moe.find import find_experts
from epfsdp2.engine.moe.router.losses import RouterLosses
from epfsdp2.engine.moe.router.replay import RouterReplay
from epfsdp2.engine.moe.shared_experts import SharedExperts
from epfsdp2.engine.wrap_forward import ORDER, wrap_forward, wrapped_by
from tests.parity.families import FAMILIES


def test_wrap_forward_calls_the_last_wrapper_first():
    module = nn.Identity()
    calls = []
    for name in ("router_losses", "autocast"):
        wrap_forward(module, name, lambda forward, x, name=name: calls.append(name) or forward(x))
    assert module(3) == 3 and calls == ["autocast", "router_losses"]
    assert wrapped_by(module) == ("router_losses", "autocast") and type(module) is nn.Identity


def test_wrap_forward_refuses_a_wrapper_that_comes_too_late():
    for earlier, later in itertools.pairwise(ORDER):
        module = nn.Identity()
        wrap_forward(module, later, lambda forward, x: forward(x) + 1)
        with pytest.raises(RuntimeError, match=f"{earlier} can't wrap the forward of Identity after"):
            wrap_forward(module, earlier, lambda forward, x: forward(x) + 1)
        assert module(1) == 2 and wrapped_by(module) == (later,)


def test_wrap_forward_of_every_feature_wraps_in_the_listed_order():
    with torch.device("meta"):
        model, other = (FAMILIES["glm4_moe"].build(first_k_dense_replace=0) for _ in range(2))
    experts, layers = find_experts(model), list(model.model.layers)
    RouterLosses(model, experts, aux_coef=0.1)
    RouterReplay(model, experts, len(layers))
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
        RouterReplay(model, experts, len(layers))
    # A part that is compiled and recomputed is compiled inside.
    layers, modules = list(other.model.layers), [info.module for info in find_experts(other)]
    compile_dense_parts(layers, modules, backend="eager")
    checkpoint_layers(layers, modules, 4, "selective")
    assert wrapped_by(layers[0].self_attn) == ("compile", "recompute")
