"""GRPO with ``engine.rollout_bitwise``: verl logs that vLLM's probabilities are the trainer's, at every step."""

import json

import pytest

from tests.e2e.runs import finished, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BITWISE = ["engine.batch_invariant=True", "engine.rollout_bitwise=True"]
BFLOAT16 = ["actor_rollout_ref.rollout.dtype=bfloat16", "engine.dtype=bfloat16", "engine.mixed_precision=null"]


@pytest.mark.parametrize("settings", [[], BFLOAT16], ids=["float32", "bfloat16"])
def test_every_step_logs_a_difference_of_exactly_zero_and_the_reward_rises(folder, warmed_up, settings):
    output = folder / ("bitwise_bf16" if settings else "bitwise")
    run = finished(output, 12, "--model", warmed_up, *overrides(*BITWISE, *settings))
    assert [step["training/rollout_probs_diff_max"] for step in run.steps()] == [0.0] * 12
    assert all(step["training/rollout_probs_diff_valid"] == 1 for step in run.steps())
    summary = json.loads((run.output / "summary.json").read_text())
    assert summary["passed"], summary
