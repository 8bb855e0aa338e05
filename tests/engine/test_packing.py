"""Sequences packed into one row against the same apart, for every family of the parity table."""

import pytest
import torch
import transformers
from packaging.version import Version

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.model.families import why_not_packed
from epfsdp2.engine.model.vision import VisionTowerSync
from epfsdp2.engine.preflight.features import check_packing
from tests.parity import families
from tests.support.models import VOCAB


def _model(name, folder):
    kind = families._model_class(families.FAMILIES[name].model)
    folder = families.save(name, folder)
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    try:
        return kind.from_pretrained(folder, attn_implementation="sdpa", **options).eval()
    except ValueError as error:
        assert "does not support an attention implementation" in str(error)
        return kind.from_pretrained(folder, attn_implementation="eager", **options).eval()  # whose masks are alike


@pytest.mark.parametrize("name", families.FAMILIES)
def test_packed_sequences_are_apart_or_refused(tmp_path, name):
    model = _model(name, tmp_path)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randint(3, VOCAB - 6, (1, length), generator=generator) for length in (9, 7)]
    inputs = {
        "input_ids": torch.cat(parts, 1),
        "position_ids": torch.cat([torch.arange(part.shape[1]) for part in parts])[None],
        "attention_mask": None,
    }
    if hasattr(model.config, "vision_config"):
        VisionTowerSync(model).prepare_inputs(inputs)
    with torch.no_grad():
        apart = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1)
        packed = model(**inputs, use_cache=False).logits
    same = (packed - apart).abs().max() < 1e-4
    refused = why_not_packed(model.config, flash=False) is not None
    if name == "glm_moe_dsa" and Version(transformers.__version__) >= Version("5.12"):
        assert same and refused  # its mask is made from positions since then; with flash attention it was not tried
    else:
        assert same != refused


def test_it_is_refused_on_the_driver(tmp_path):
    from epfsdp2.engine.preflight.model_facts import inspect_model

    model = {"path": str(families.save("qwen3_next", tmp_path))}
    model["override_config"] = {"attn_implementation": "sdpa"}
    facts = inspect_model(model)
    with pytest.raises(SettingError, match=r"use_remove_padding=True: packs .* carry a state .*=False"):
        check_packing(1, model, facts)
    check_packing(1, model | {"use_remove_padding": False}, facts)
