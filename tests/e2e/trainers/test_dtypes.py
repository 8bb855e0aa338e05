"""GRPO in float16 keeps the trainer's probabilities closer to vLLM's than in bfloat16, with the same settings."""

import statistics

import pytest

from tests.e2e.runs import differences, finished, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_difference_to_the_rollout_in_float16_is_below_half_of_that_in_bfloat16(folder, warmed_up):
    found = {}
    for dtype in ("bfloat16", "float16"):
        settings = [f"actor_rollout_ref.rollout.dtype={dtype}", f"engine.dtype={dtype}", "engine.mixed_precision=null"]
        run = finished(folder / f"in_{dtype}", 4, "--model", warmed_up, *overrides(*settings))
        found[dtype] = statistics.mean(differences(run.steps()))
    assert 0 < found["float16"] < found["bfloat16"] / 2, found
