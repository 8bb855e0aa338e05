"""FLOPs of an update, against torch's count of the plain model's products."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import copy_on_meta
from epfsdp2.engine.planner.flops import Flops
from epfsdp2.engine.planner.model_sizes import ModelSizes
from tests.parity.families import ALL, FAMILIES, save
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import ppo_worker

LENGTH = 24
COUNTED = ["deepseek_v3", "gemma4", "glm4_moe", "glm4v_moe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3", "qwen3_vl_moe"]


def _flops(model):
    return Flops.of(ModelSizes.built_by(lambda dtype: copy_on_meta(model, dtype), ShardingOptions()))


@pytest.mark.parametrize("family", COUNTED)
def test_flops_of_an_update_are_the_products_that_torch_counts(family):
    model = ALL[family].build("eager").float()
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(3, 90, (1, LENGTH)), use_cache=False).logits.sum().backward()
    flops = _flops(model)
    causal = flops.per_pair * LENGTH**2 / 2  # eager attention computes the other half as well
    assert flops.of_sequences([LENGTH]) + causal == pytest.approx(counter.get_total_flops(), rel=2e-4)
    assert flops.of_sequences([LENGTH, 2 * LENGTH]) == 3 * LENGTH * flops.per_token + 5 * causal


def _mfu(folder):
    actor, reference = ppo_worker(folder, 2), ppo_worker(folder, 2, forward_only=True)
    wanted = _flops(FAMILIES["glm4_moe"].build()).of_sequences([10, 20]) / 2e12
    for worker in (actor, reference):
        assert worker.flops_counter.estimate_flops([10, 20], 2.0)[0] == pytest.approx(wanted) and wanted > 0


def test_flops_of_a_family_without_a_formula_in_verl_are_counted_for_actor_and_reference(tmp_path):
    run_ranks(_mfu, 2, save("glm4_moe", tmp_path))
