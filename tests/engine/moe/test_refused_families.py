"""Families whose experts the engine can't shard are refused, never taken for dense ones, and listed with the reason."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.moe.find import UnsupportedModelError, find_experts, is_dense, is_on_interface
from epfsdp2.engine.preflight.model import inspect_model
from tests.parity.families import ALL
from tests.support.models.tiny import save_qwen3_moe

ROOT = Path(__file__).parents[3]
REFUSED = {
    "diffusion_gemma": "its logits are of a canvas of tokens that is denoised, not of the next token",
    "doge": "an expert is a row of two embeddings, found by product keys",
    "jetmoe": "experts in attention as well, whose inputs and outputs are routed apart",
    "longcat_flash": "some experts return their input; `gate_up_proj` counts them and `down_proj` does not",
    "muse_spark": "a norm of each expert's output, whose weight all experts share",
    "nllb_moe": "experts in a dict of modules, in an encoder and a decoder",
    "switch_transformers": "experts in a dict of modules, in an encoder and a decoder",
    "vitpose_backbone": "no language model: it finds the joints of bodies in images",
}
"""Families of transformers with experts that are not trained, by the name of their folder there, and why."""
DENSE = {"bamba": "dense, although its code names experts: it has one"}
NOT_LOOKED_AT: tuple[str, ...] = ()
"""Families that a new transformers has, before anyone has tried them."""

OUTSIDE = {
    "longcat_flash": ({"num_layers": 2}, "LongcatFlashExperts"),
    "jetmoe": ({"num_hidden_layers": 2}, "JetMoeParallelExperts"),
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
def test_find_experts_of_a_family_outside_the_interface_refuses_with_a_reason(family):
    settings, holder = OUTSIDE[family]
    model = _on_meta(family, **settings)
    if any(map(is_on_interface, model.modules())):  # transformers has put it there since
        assert len(find_experts(model)) == settings["num_hidden_layers"]
        return
    for find in (find_experts, is_dense):
        with pytest.raises(UnsupportedModelError, match=f"{holder}.*, outside transformers' experts interface"):
            find(model)


def test_inspect_model_of_a_family_that_denoises_is_refused_for_its_logits(tmp_path):
    built = _on_meta("qwen3_moe", num_hidden_layers=1, num_experts=8)
    path = str(save_qwen3_moe(tmp_path))
    assert inspect_model({"path": path}, built=built) is not None
    built.config.model_type = "diffusion_gemma"
    with pytest.raises(SettingError, match="canvas of tokens that is denoised"):
        inspect_model({"path": path}, built=built)


def test_find_experts_of_a_family_with_a_norm_after_its_experts_refuses():
    module = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    with torch.device("meta"):
        experts = module.MuseSparkExperts(AutoConfig.for_model("muse_spark_text", num_local_experts=4))
    with pytest.raises(UnsupportedModelError, match="has post_expert_norm"):
        find_experts(torch.nn.ModuleDict({"experts": experts}))


def test_inspect_model_of_a_backbone_with_experts_is_refused(tmp_path):
    path = save_qwen3_moe(tmp_path)
    AutoConfig.for_model("vitpose_backbone", num_experts=4, part_features=8).save_pretrained(path)
    with pytest.raises(SettingError, match="can't build a model from its config.*VitPoseBackboneConfig"):
        inspect_model({"path": str(path)})


def test_families_page_has_every_family_with_experts_of_the_installed_transformers():
    """A release of transformers fails here with its new families: try them, or add them to ``NOT_LOOKED_AT``."""
    models = Path(transformers.__file__).parent / "models"
    found = {file.parent.name for file in models.glob("*/modeling_*.py") if "experts" in file.read_text()}
    listed = set(re.findall(r"^\| (\w+) \|", (ROOT / "docs/families.md").read_text(), flags=re.M))
    assert found and found - listed == set()
    refused = {*REFUSED, *DENSE, *NOT_LOOKED_AT}
    assert refused <= listed and not refused & ALL.keys()
    newest = re.findall(r"^transformers==(.*)$", (ROOT / ".ci/stacks/newest.txt").read_text(), flags=re.M)[0]
    if Version(transformers.__version__) >= Version(newest):
        assert refused <= found


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "qwen3_5_text"])
def test_is_dense_of_a_model_without_experts_is_true(family):
    model = _on_meta(family, num_hidden_layers=2)
    assert is_dense(model) and find_experts(model) == []
    assert is_dense(model, {"model.layers.*.moe.w1": 0})  # which is said of another role's model
    assert not is_dense(model, {"model.layers.*.mlp.up_proj.weight": 0})


@pytest.mark.parametrize("family", DENSE)
def test_is_dense_of_a_family_whose_code_alone_names_experts_is_true(family):
    assert is_dense(_on_meta(family, num_hidden_layers=2))


def test_find_experts_where_the_config_alone_counts_some_refuses():
    with pytest.raises(
        UnsupportedModelError, match="Qwen3MoeForCausalLM says num_local_experts=8, but none of its modules"
    ):
        find_experts(_on_meta("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[0], num_experts=8))
    with pytest.raises(UnsupportedModelError, match="says num_experts=16384"):
        find_experts(_on_meta("doge", num_hidden_layers=1, is_moe=False))


class _Switched(torch.nn.Module):
    """Experts that nothing but a name or a shape gives away."""

    def __init__(self, listed):
        super().__init__()
        self.up = torch.nn.Linear(4, 4)
        if listed:
            self.local_experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        else:
            self.w1 = torch.nn.Parameter(torch.zeros(2, 4, 4))


@pytest.mark.parametrize(("listed", "said"), [(True, "local_experts"), (False, r"w1 \(2, 4, 4\)")])
def test_find_experts_of_what_may_be_experts_refuses(listed, said):
    model = _on_meta("qwen3", num_hidden_layers=1)
    model.model.layers[0].mlp = _Switched(listed)
    with pytest.raises(UnsupportedModelError, match=said):
        find_experts(model)
