"""GRPO whose two trainer ranks share every expert, into vLLM with tensor parallelism and into one vLLM of each rank."""

import pytest

from tests.e2e.runs import finished, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.parametrize("tp", [1, 2])
def test_run_with_cut_experts_trains_and_vllm_has_its_weights(folder, warmed_up, tp):
    settings = overrides(
        "engine.ep_size=1",
        "engine.etp_size=2",
        "engine.rollout_sync=sliced",
        "engine.rollout_sync_verify=-1",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp}",
    )
    steps = finished(folder / f"cut_{tp}", 3, "--model", warmed_up, *settings).steps()
    assert all(step["training/rollout_probs_diff_mean"] < 1e-4 for step in steps)
    assert all(step["actor/grad_norm"] > 0 and step["actor/skipped_steps"] == 0 for step in steps)
