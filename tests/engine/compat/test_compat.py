"""Private names of libraries that have moved or are missing, and transformers' conversions of sharded models."""

import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from epfsdp2.engine.compat import transformers_names
from epfsdp2.engine.compat.private_names import MissingNameError, look_up
from tests.parity.families import FAMILIES
from tests.support.ranks import run_ranks


def test_look_up_of_a_moved_name_takes_the_first_place_that_has_it():
    places = "torch.gone:relu", "torch.nn:Gone", "torch.nn.functional:relu"
    assert look_up(*places, known="2.11") is torch.nn.functional.relu


def test_look_up_of_a_missing_name_says_version_places_and_what_works():
    wanted = (
        f"torch {torch.__version__} has no torch.nn:Gone or torch.gone:Gone, which epfsdp2 needs. "
        "What works: torch 2.11 to 2.15; or engine.x=1"
    )
    with pytest.raises(MissingNameError, match=f"^{re.escape(wanted)}$") as error:
        look_up("torch.nn:Gone", "torch.gone:Gone", known="2.11 to 2.15", instead="engine.x=1")
    assert not isinstance(error.value, ImportError)


def test_renamed_with_any_parameter_name_adds_the_prefix():
    swap = transformers_names.WeightRenaming("old", "norm")
    for key, renamings in (("norm.weight", []), ("model.old.weight", [swap])):
        found = transformers_names.renamed(key, renamings, [], "model", {"model.norm.weight": 1})
        assert found == ("model.norm.weight", None)


def _compare_conversions():
    model = FAMILIES["qwen3_moe"].build()

    def conversions():
        found = transformers_names.get_model_conversion_mapping(model)
        return [(t.source_patterns, t.target_patterns, t.scope_prefix) for t in found]

    before = conversions()
    fully_shard(model.model, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert conversions() == before and len(before) > 1
    seen = transformers_names._unsharded(model).named_modules()
    kinds = [type(module).__name__ for _, module in seen if isinstance(module, PreTrainedModel)]
    assert kinds == ["Qwen3MoeForCausalLM", "Qwen3MoeModel"]  # not FSDP's classes, for which there are no conversions
    assert isinstance(model, FSDPModule) and isinstance(model.model, FSDPModule)


def test_hf_conversions_of_a_sharded_model_are_those_of_the_plain_one():
    run_ranks(_compare_conversions, 1)
