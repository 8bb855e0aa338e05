"""Router replay with real vLLM: what it recorded while it generated is what the trainer takes."""

from pathlib import Path

import pytest

from tests.e2e.models.replay import BFLOAT16, REPLAY, with_near_ties
from tests.e2e.runs import finished, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_router_replay_of_rollout_routes_brings_log_probs_together(folder, warmed_up):
    """R3 against the same seed without it."""
    model = with_near_ties(Path(warmed_up), folder / "near_ties")
    native = finished(folder / "native", 2, "--model", model, *overrides(*BFLOAT16)).steps()
    replayed = finished(folder / "replayed", 2, "--model", model, *overrides(*BFLOAT16, *REPLAY)).steps()
    assert "actor/router_replay_differing" not in native[0]
    assert all(step["actor/router_replay_differing"] > 0.02 for step in replayed)
    # The first step: both have the same weights, prompts and seeds, so only rounding differs.
    for metric in ("training/rollout_probs_diff_mean", "rollout_corr/k3_kl"):
        assert replayed[0][metric] < native[0][metric], (metric, native[0][metric], replayed[0][metric])
