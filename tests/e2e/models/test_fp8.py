"""GRPO with vLLM in FP8, which gets slices that the trainer's ranks have quantised."""

import functools
import re

import pytest
import torch

from epfsdp2.recipes.quickstart import model
from tests.e2e.runs import differences, finished, overrides
from tests.e2e.trainers.trainers import CHANGES

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU build has FP8 kernels for processors with AMX alone"
    ),
]
STEPS = 4
COMMON = [
    "actor_rollout_ref.rollout.quantization=fp8",
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "engine.dtype=bfloat16",
    "engine.mixed_precision=null",
    "engine.rollout_sync_verify=-1",
]
# vLLM refuses FP8 where a block holds rows of two projections.
SIZES = {"moe_intermediate_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}


def test_a_rollout_in_fp8_follows_a_trainer_that_rounds_its_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "build_model", functools.partial(model.build_model, **SIZES))
    model.write_model(tmp_path / "model", 1)
    found = {}
    for name, settings in (("plain", []), ("rounded", ["engine.rollout_quantization_aware=True"])):
        options = ["--model", str(tmp_path / "model"), "--batch-size", "8"]
        run = finished(tmp_path / name, STEPS, *options, *overrides(*COMMON, *CHANGES, *settings))
        log = (run.output / "logs" / "grpo.log").read_text(errors="replace")
        kinds = re.findall(r"weight sync (\d+), (\w+)", log)
        assert kinds == [(str(number), "sliced") for number in range(1, STEPS + 2)]
        found[name] = differences(run.steps())
    # bfloat16 alone causes half of the rounded run's difference.
    assert max(found["rounded"]) < 0.6 * min(found["plain"]), found
