"""Modules that are kept in float32 in a bfloat16 model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AfmoeConfig, AfmoeForCausalLM, DeepseekV2Config, DeepseekV2ForCausalLM

from epfsdp2.engine.compat.fsdp_groups import parameter_groups
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp.fp32_modules import correction_biases, find_float32_modules
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.wrap_plan import compute_dtypes
from tests.parity import families
from tests.support.engine.sharded import sharded_model
from tests.support.logs import logged_lines
from tests.support.models.tiny import VOCAB, token_loss
from tests.support.ranks import each_case, run_ranks

WORLD = 2


def _named_routers_stay(folder):
    model, _ = sharded_model(
        folder, WORLD, 2, param_dtype=torch.bfloat16, fp32_modules=["*.mlp.gate"], checkpointing="full"
    )
    seen = {}
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".self_attn.q_proj", ".mlp.experts")):

            def before(module, args, name=name):
                seen[name] = {next(module.parameters()).dtype}

            def after(module, args, output, name=name):
                seen[name].add((output[0] if isinstance(output, tuple) else output).dtype)

            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
    loss = token_loss(model.train(), torch.randint(0, VOCAB, (2, 9)))
    for name, dtypes in seen.items():
        assert dtypes == {torch.float32 if name.endswith("gate") else torch.bfloat16}, name
    assert sum(name.endswith("gate") for name in seen) == 2
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad.full_tensor()).all() for p in model.parameters())


def _strict_names_and_frozen_biases_stay(folder):
    # Masters of a float32 value that bfloat16 can't hold: a cast would show.
    model, _ = sharded_model(folder, WORLD, 2, param_dtype=torch.bfloat16)
    gate, seen = model.model.layers[1].mlp.gate, []
    before = gate.weight.full_tensor().clone()
    gate.register_forward_pre_hook(lambda m, args: seen.append((m.weight.detach().clone(), args[0].dtype)))
    token_loss(model.train(), torch.randint(0, VOCAB, (2, 9))).backward()
    (weight, dtype), *_ = seen
    assert not torch.equal(before, before.bfloat16().float()) and torch.equal(weight, before)
    assert dtype == torch.bfloat16 and gate.weight.grad is not None  # the family's code casts by itself
    expected = compute_dtypes(model, ShardingOptions(param_dtype=torch.bfloat16))
    biases = {name: param for name, param in model.named_parameters() if not param.requires_grad}
    assert biases and {expected.pop(name) for name in biases} == {torch.float32}
    assert not any(isinstance(param, DTensor) or param.grad is not None for param in biases.values())
    groups = [group for m in model.modules() if isinstance(m, FSDPModule) for group in parameter_groups(m)]
    params = [p for group in groups for p in group.fsdp_params]
    assert {p._param_fqn: p.param_dtype or p.orig_dtype for p in params} == expected  # by FSDP's own records


def _autocast_is_logged(folder):
    lines = logged_lines()
    sharded_model(folder, WORLD, param_dtype=torch.bfloat16)
    sharded_model(folder, WORLD)
    found = [line for line in lines if "autocast" in line]
    assert len(found) == (dist.get_rank() == 0)
    assert all("MiniMaxLightningAttention" in line and "(1 modules)" in line for line in found)


CASES = {
    "qwen3_moe": _named_routers_stay,
    "ernie4_5_moe": _strict_names_and_frozen_biases_stay,
    "minimax": _autocast_is_logged,
}


def _each_family(folder):
    each_case(((family,) for family in CASES), lambda family: CASES[family](folder / family))


def test_fp32_modules_of_a_bfloat16_model_named_kept_by_its_class_or_frozen_are_not_rounded(tmp_path):
    for family in CASES:
        families.save(family, tmp_path / family)
    run_ranks(_each_family, WORLD, tmp_path)


def test_fp32_modules_with_a_router_that_is_never_called_is_refused():
    with torch.device("meta"):
        model = DeepseekV2ForCausalLM(DeepseekV2Config(num_hidden_layers=2, first_k_dense_replace=1))
    with pytest.raises(SettingError, match=r"model.layers.1.mlp.gate, whose weight the model's code reads"):
        find_float32_modules(model, [model.model.layers[1].mlp.experts], ["*.mlp.gate"])


def test_correction_biases_beside_a_frozen_parameter_of_their_size_are_the_biases_alone():
    with torch.device("meta"):
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "head_dim": 8, "num_experts": 8}
        model = AfmoeForCausalLM(AfmoeConfig(**sizes, num_dense_layers=1, num_experts_per_tok=2, vocab_size=VOCAB))
    for name, param in model.named_parameters():
        if name.endswith("q_norm.weight"):
            assert param.numel() == 8
            param.requires_grad_(False)
    assert correction_biases(model, {8}) == {model.model.layers[1].mlp.expert_bias}


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4))
        self.q, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)


def _model(strict):
    model = nn.Module()
    model.attention, model.gate = _Attention(), nn.Linear(4, 4)
    model._keep_in_fp32_modules_strict = strict
    return model


def test_fp32_convolution_that_the_class_names_is_wrapped_with_its_parent():
    """Bailing's linear attention passes its weight to a kernel and does not call it, so FSDP would not gather it."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.conv1d = nn.Linear(8, 8), nn.Conv1d(8, 8, 4, groups=8, bias=False)

    model = nn.ModuleDict({"attn": Attention(), "conv1d": nn.Linear(8, 8)})
    model._keep_in_fp32_modules_strict = {"conv1d"}
    attention = model["attn"]
    found = {f.module: f.low_precision_children for f in find_float32_modules(model, [])}
    assert found == {attention: (attention.q_proj,), model["conv1d"]: ()}


def test_find_float32_modules_of_a_pattern_has_inner_modules_first():
    model = _model([])
    order = [found.module for found in find_float32_modules(model, [], ["attention*"])]
    assert order == [model.attention.norm, model.attention.q, model.attention]


@pytest.mark.parametrize(
    ("pattern", "rule"), [("*.rooter", "matches no module"), ("*", "holds experts"), ("attention", "holds experts")]
)
def test_fp32_modules_with_a_wrong_pattern_is_refused(pattern, rule):
    model = _model([])
    with pytest.raises(SettingError, match=rule):
        find_float32_modules(model, [model.attention.q], [pattern])
