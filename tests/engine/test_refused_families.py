"""Families whose experts are not on transformers' interface are refused with the classes that hold them."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from epfsdp2.engine.experts.find import UnsupportedModelError, find_experts

OUTSIDE = {
    "llama4_text": ({"num_hidden_layers": 4}, "Llama4TextExperts"),
    "longcat_flash": ({"num_layers": 2}, "LongcatFlashExperts"),
    "granitemoe": ({"num_hidden_layers": 2}, "GraniteMoeParallelExperts"),
    "granitemoeshared": ({"num_hidden_layers": 2}, "GraniteMoeSharedParallelExperts"),
    "granitemoehybrid": ({"num_hidden_layers": 32}, "GraniteMoeHybridParallelExperts"),
    "jetmoe": ({"num_hidden_layers": 2}, "JetMoeParallelExperts"),
    "dbrx": ({"n_layers": 2, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 1e4}}, "DbrxExperts"),
    "aria_text": ({"num_hidden_layers": 2}, "AriaGroupedExpertsGemm"),
    "switch_transformers": ({"num_layers": 2}, "SwitchTransformersExperts"),
    "nllb-moe": ({"encoder_layers": 4, "decoder_layers": 4}, "NllbMoeExperts"),
    "doge": ({"num_hidden_layers": 2, "is_moe": True}, "DogeCDMoE"),
}
SEQ2SEQ = ("switch_transformers", "nllb-moe")


def _on_meta(family, **settings):
    kind = AutoModelForSeq2SeqLM if family in SEQ2SEQ else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(AutoConfig.for_model(family, **settings))


@pytest.mark.parametrize("family", OUTSIDE)
def test_a_family_outside_the_interface_is_refused_with_a_reason(family):
    settings, holder = OUTSIDE[family]
    model = _on_meta(family, **settings)
    if any(hasattr(module, "is_transposed") for module in model.modules()):  # transformers has put it there since
        assert len(find_experts(model)) == settings["num_hidden_layers"]
        return
    with pytest.raises(UnsupportedModelError, match="outside transformers' experts interface") as error:
        find_experts(model)
    assert holder in str(error.value)


def test_a_dense_model_is_refused_as_one():
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM is a dense model"):
        find_experts(_on_meta("qwen3", num_hidden_layers=2))
