"""What happens where a library has changed a private name."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from epfsdp2.engine.compat import transformers_names
from epfsdp2.engine.compat.private_names import MissingNameError, look_up
from epfsdp2.engine.moe.find import UnsupportedModelError, find_experts
from tests.support.ranks import run_ranks


def test_look_up_of_a_moved_name_takes_the_first_place_that_has_it():
    assert (
        look_up("torch.gone:relu", "torch.nn:Gone", "torch.nn.functional:relu", known="2.11")
        is torch.nn.functional.relu
    )


def test_look_up_of_a_missing_name_says_version_places_and_what_works():
    with pytest.raises(MissingNameError) as error:
        look_up("torch.nn:Gone", "torch.gone:Gone", known="2.11 to 2.15", instead="engine.x=1")
    wanted = (
        f"torch {torch.__version__} has no torch.nn:Gone or torch.gone:Gone, which epfsdp2 needs. "
        "What works: torch 2.11 to 2.15; or engine.x=1"
    )
    assert str(error.value) == wanted
    assert not isinstance(error.value, ImportError)


def test_renamed_with_any_parameter_name_adds_the_prefix():
    known = {"model.norm.weight": 1}
    assert transformers_names.renamed("norm.weight", [], [], "model", known) == ("model.norm.weight", None)
    swap = transformers_names.WeightRenaming("old", "norm")
    assert transformers_names.renamed("model.old.weight", [swap], [], "model", known) == ("model.norm.weight", None)


class _Experts(nn.Module):
    def __init__(self, **flags):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.empty(4, 6, 5)), nn.Parameter(torch.empty(4, 5, 3))
        for name, value in {"has_gate": True, "has_bias": False, "is_transposed": False, **flags}.items():
            setattr(self, name, value)


@pytest.mark.parametrize("flags", [{}, {"has_post_expert_norm": False}])
def test_find_experts_without_a_post_expert_norm_finds_them(flags):
    assert [info.num_experts for info in find_experts(nn.ModuleDict({"experts": _Experts(**flags)}))] == [4]


def test_find_experts_with_a_post_expert_norm_refuses_it_by_name():
    experts = _Experts(has_post_expert_norm=True)
    experts.post_expert_norm = nn.RMSNorm(5)
    with pytest.raises(UnsupportedModelError, match=re.escape("experts (_Experts) has post_expert_norm")):
        find_experts(nn.ModuleDict({"experts": experts}))


def _compare_conversions():
    config = Qwen3MoeConfig(
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=2,
        num_experts_per_tok=1,
        vocab_size=16,
    )
    model = Qwen3MoeForCausalLM(config)

    def asked():
        found = transformers_names.get_model_conversion_mapping(model)
        return [(t.source_patterns, t.target_patterns, t.scope_prefix) for t in found]

    before = asked()
    fully_shard(model.model, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert asked() == before and len(before) > 1
    seen = transformers_names._unsharded(model).named_modules()
    kinds = [type(module).__name__ for _, module in seen if isinstance(module, PreTrainedModel)]
    assert kinds == ["Qwen3MoeForCausalLM", "Qwen3MoeModel"]  # not FSDP's, by which nothing is found
    assert isinstance(model, FSDPModule) and isinstance(model.model, FSDPModule)


def test_hf_conversions_of_a_sharded_model_are_those_of_the_plain_one():
    run_ranks(_compare_conversions, 1)
