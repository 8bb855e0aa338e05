"""GRPO whose two trainer ranks share rows, each with a half of the experts and a vLLM of its own."""

import pytest

from tests.e2e.runs import finished, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_sequence_parallel_run_trains(folder, warmed_up):
    settings = overrides("engine.ulysses_sequence_parallel_size=2", "actor_rollout_ref.actor.use_dynamic_bsz=True")
    steps = finished(folder / "shared_rows", 3, "--model", warmed_up, *settings).steps()
    # vLLM, which shares nothing, agrees on every token before and after the updates.
    assert all(step["training/rollout_probs_diff_mean"] < 5e-3 for step in steps)
    assert all(step["actor/grad_norm"] > 0 and step["actor/skipped_steps"] == 0 for step in steps)
