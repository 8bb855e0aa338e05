"""A model of the user's own, its experts named by a plan, against itself in one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.moe.find import UnsupportedModelError, find_experts
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.support.engine.sharded import whole_gradients
from tests.support.models.own_model import EXPERTS, HIDDEN, INNER, PLAN, OwnModel
from tests.support.models.tiny import VOCAB, reference_model, save_qwen3_moe, token_loss
from tests.support.ranks import run_ranks

WORLD = 4


def _model():
    torch.manual_seed(0)
    return OwnModel(PretrainedConfig())


def _planned_model_is_exact():
    rank = dist.get_rank()
    ids = torch.randint(0, VOCAB, (WORLD, 9), generator=torch.Generator().manual_seed(1))
    reference = _model()
    model = copy.deepcopy(reference)
    token_loss(reference, ids).backward()
    wanted = dict(reference.named_parameters())
    for ep, dim in [(4, "auto"), (2, 0)]:
        sharded = copy.deepcopy(model)
        meshes = build_meshes("cpu", Topology.arrange(WORLD, ep))
        options = ShardingOptions(param_dtype=torch.float32, expert_plan=PLAN, expert_shard_dim=dim)
        parallelize(sharded, meshes, options)
        local = sharded.layers[0].pool.w_in.to_local()
        assert local.numel() * WORLD == HIDDEN * EXPERTS * INNER
        token_loss(sharded, ids[rank : rank + 1]).backward()
        for name, grad in whole_gradients(sharded).items():
            want = wanted[name].grad
            assert (grad - want).norm() <= 1e-5 * want.norm(), (ep, dim, name)


def test_expert_plan_of_a_custom_model_has_the_gradients_of_the_unsharded_one():
    run_ranks(_planned_model_is_exact, WORLD)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"*.pool.w_inn": 0}, ["*.pool.w_inn", "matches no parameter", "layers.0.pool.w_in"]),
        ({"*.pool.w_in": 3}, ["engine.expert_plan.*.pool.w_in=3", "(8, 12, 6)", "[0, 1, 2]"]),
        ({"*.pool.w_in": 0, "*.pool.w_out": 0}, ["disagree", "'w_in': 8", "'w_out': 12"]),
        ({"*.router.weight": 0}, ["Linear", "set_expert_parallel", "use_experts_implementation"]),
    ],
)
def test_expert_plan_that_is_wrong_says_what_is_wrong(plan, words):
    with pytest.raises(SettingError) as error:
        find_experts(_model(), plan)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_expert_plan_of_a_module_with_other_parameters_is_refused():
    model = _model()
    with pytest.raises(UnsupportedModelError, match="OwnModel"):  # without a plan
        find_experts(model)
    model.layers[1].pool.scale = nn.Parameter(torch.ones(HIDDEN))
    with pytest.raises(SettingError, match=r"Pool has parameters without a dim for its experts: scale") as error:
        find_experts(model, PLAN)
    assert "move the rest to its parent" in str(error.value)


def test_expert_plan_of_experts_on_the_interface_takes_dim_0_only(tmp_path):
    model = reference_model(save_qwen3_moe(tmp_path))
    found = find_experts(model, {"model.layers.0.mlp.experts.*": 0})
    assert [info.fqn for info in found] == ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]
    with pytest.raises(SettingError, match="dim 0"):
        find_experts(model, {"model.layers.0.mlp.experts.gate_up_proj": 1})
