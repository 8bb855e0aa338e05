"""GRPO whose two trainer ranks share every expert, into vLLM with tensor parallelism and into one vLLM of each rank."""

import pytest

from tests.e2e.runs import overrides, running

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 3


@pytest.mark.parametrize("tp", [1, 2])
def test_run_with_cut_experts_trains_and_vllm_has_its_weights(folder, warmed_up, tp):
    settings = overrides(
        "engine.ep_size=1",
        "engine.etp_size=2",
        "engine.rollout_sync=sliced",
        "engine.rollout_sync_verify=-1",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp}",
    )
    with running(folder / f"cut_{tp}", "--model", warmed_up, "--steps", str(STEPS), *settings) as run:
        run.wait()
    steps = run.steps()
    assert len(steps) == STEPS, run.text()[-3000:]
    assert all(step["training/rollout_probs_diff_mean"] < 1e-4 for step in steps)
    assert all(step["actor/grad_norm"] > 0 and step["actor/skipped_steps"] == 0 for step in steps)
