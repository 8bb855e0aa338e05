"""GRPO with ``engine.rollout_bitwise``: verl logs that vLLM's probabilities are the trainer's, at every step."""

import json

import pytest

from epfsdp2.engine.compat import versions
from tests.e2e.runs import finished, overrides

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(not versions.vllm_in("==0.27.1"), reason="rollout_bitwise was shown with vLLM 0.27.1 alone"),
]

BITWISE = ["engine.batch_invariant=True", "engine.rollout_bitwise=True"]
ROLLOUT = "actor_rollout_ref.rollout"
BFLOAT16 = [f"{ROLLOUT}.dtype=bfloat16", "engine.dtype=bfloat16", "engine.mixed_precision=null"]
# Two workers of one replica, and samples from a part of another distribution.
SHARED = [f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.temperature=0.9", f"{ROLLOUT}.top_p=0.95"]
REPLAYED = ["engine.router_replay.mode=R3", f"{ROLLOUT}.enable_rollout_routing_replay=True"]
RUNS = {
    "float32": [],
    "bfloat16": BFLOAT16,
    "two_workers": SHARED,
    "two_workers_bfloat16_replayed": [*BFLOAT16, *SHARED, *REPLAYED, "engine.ep_size=1"],
}


@pytest.mark.parametrize("name", RUNS)
def test_every_step_logs_a_difference_of_exactly_zero_and_the_reward_rises(folder, warmed_up, name):
    run = finished(folder / f"bitwise_{name}", 12, "--model", warmed_up, *overrides(*BITWISE, *RUNS[name]))
    assert [step["training/rollout_probs_diff_max"] for step in run.steps()] == [0.0] * 12
    assert all(step["training/rollout_probs_diff_valid"] == 1 for step in run.steps())
    # The rollout's routes are the trainer's own.
    differing = [step.get("actor/router_replay_differing") for step in run.steps()]
    assert differing == [0.0 if "replayed" in name else None] * 12
    summary = json.loads((run.output / "summary.json").read_text())
    assert summary["passed"], summary
