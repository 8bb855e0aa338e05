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


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "build_model", functools.partial(model.build_model, **SIZES))
    model.write_model(tmp_path / "model", 1)

    def run_with(name, *settings):
        options = ["--model", str(tmp_path / "model"), "--batch-size", "8"]
        run = finished(tmp_path / name, STEPS, *options, *overrides(*COMMON, *CHANGES, *settings))
        return run.steps(), (run.output / "logs" / "grpo.log").read_text(errors="replace")

    return run_with


def test_a_rollout_in_fp8_follows_a_trainer_that_rounds_its_weights(start):
    plain, log = start("plain")
    kinds = re.findall(r"weight sync (\d+), (\w+)", log)
    assert kinds == [(str(number), "sliced") for number in range(1, STEPS + 2)]
    rounded, _ = start("rounded", "engine.rollout_quantization_aware=True")
    # Half of it is what bfloat16 differs by.
    assert max(differences(rounded)) < 0.6 * min(differences(plain)), (differences(rounded), differences(plain))
