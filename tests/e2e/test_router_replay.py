"""Router replay with real vLLM: what it recorded while it generated is what the trainer takes."""

import pytest

from tests.e2e.conftest import running

pytestmark = pytest.mark.e2e

# In bfloat16 trainer and vLLM round differently, and routers have near ties.
BFLOAT16 = ["engine.mixed_precision=null", "engine.dtype=bfloat16", "actor_rollout_ref.rollout.dtype=bfloat16"]
REPLAY = ["engine.router_replay.mode=R3", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"]
STEPS = 3


def _steps(folder, model: str, *settings: str) -> list[dict]:
    options = ["--model", model, "--steps", str(STEPS)]
    for setting in settings:
        options += ["--override", setting]
    with running(folder, *options) as run:
        run.wait()
    assert len(run.steps()) == STEPS, run.text()[-3000:]
    return run.steps()


def test_routes_of_the_rollout_bring_trainer_and_rollout_together(folder, warmed_up):
    """R3 against the same seed without it."""
    native = _steps(folder / "native", warmed_up, *BFLOAT16)
    replayed = _steps(folder / "replayed", warmed_up, *BFLOAT16, *REPLAY)
    share = [step["actor/router_replay_differing"] for step in replayed]
    assert all(0 < s < 0.2 for s in share), share
    assert "actor/router_replay_differing" not in native[0]
    # The first step: both have the same weights, prompts and seeds.
    for metric in ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"):
        assert replayed[0][metric] < native[0][metric], (metric, native[0], replayed[0])
