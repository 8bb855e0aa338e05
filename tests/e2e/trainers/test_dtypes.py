"""GRPO in float16 keeps the trainer's probabilities closer to vLLM's than in bfloat16, with the same settings."""

import statistics

import pytest

from tests.e2e.runs import overrides, running

pytestmark = [pytest.mark.e2e, pytest.mark.long]
STEPS = 4


def test_difference_to_the_rollout_in_float16_is_below_half_of_that_in_bfloat16(folder, warmed_up):
    found = {}
    for dtype in ("bfloat16", "float16"):
        settings = [f"actor_rollout_ref.rollout.dtype={dtype}", f"engine.dtype={dtype}", "engine.mixed_precision=null"]
        options = ["--model", warmed_up, "--steps", str(STEPS), *overrides(*settings)]
        with running(folder / f"in_{dtype}", *options) as run:
            run.wait()
        steps = [step for step in run.steps() if "actor/grad_norm" in step]
        assert len(steps) == STEPS, run.text()[-3000:]
        found[dtype] = statistics.mean(step["training/rollout_probs_diff_mean"] for step in steps)
    assert 0 < found["float16"] < found["bfloat16"] / 2, found
