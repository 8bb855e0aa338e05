"""SGLang with verl's trainers that generate in processes of their own, and with routes that SGLang has recorded."""

from importlib.util import find_spec

import pytest

from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.models.replay import BFLOAT16, REPLAY, with_near_ties
from tests.e2e.runs import finished, overrides
from tests.e2e.trainers.trainers import (
    FULLY_ASYNC,
    ONE_AT_A_TIME,
    ONE_STEP_OFF,
    OTHER,
    SAME,
    SEPARATE,
    STANDALONE,
    ZERO_IN_THE_THIRD,
    differences,
    is_learning,
    steps_of,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (make setup STACK=sglang)"),
]
# verl 0.9.1 reads what SGLang 0.5.12 sends as a tensor where SGLang has no tokenizer, and it is text there too.
_ROUTES_AS_TEXT = "actor_rollout_ref.rollout.skip_tokenizer_init=False"


@pytest.mark.parametrize("sync", ["auto", "full"])
def test_standalone_sglang_follows_the_trainer(tmp_path, monkeypatch, sync):
    # verl 0.9.1 logs with an argument that logging does not have, at info level, where there are no hybrid replicas.
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARNING")
    write_model(tmp_path / "model", 1)
    settings = overrides(*STANDALONE, f"engine.rollout_sync={sync}")
    options = ["--rollout", "sglang", "--model", str(tmp_path / "model"), *settings]
    run = finished(tmp_path / "run", 4, *options)
    steps = run.steps()
    first, second, third, fourth = differences(steps)
    # As with vLLM: the updates before steps 2 and 3 are missed for a step, the one before step 4 changed nothing.
    assert first < SAME and second > OTHER and third > OTHER and fourth < SAME, (first, second, third, fourth)
    # Each of the two ranks sends its own slices; one rank sends full tensors.
    sent = pytest.approx(4.71 if sync == "auto" else 9.42, rel=0.02)
    assert all(step["weight_sync/sent_megabytes"] == sent for step in steps)
    assert run.living() == []


def test_one_step_off_trainer_trains_with_sglang(tmp_path):
    steps = steps_of(tmp_path, 4, *SEPARATE, *ZERO_IN_THE_THIRD, program=ONE_STEP_OFF, rollout="sglang")
    first, second, third, fourth = differences(steps)
    assert first < SAME and second > OTHER and third > OTHER and fourth < SAME, (first, second, third, fourth)


def test_fully_async_trainer_trains_with_sglang(tmp_path):
    steps = steps_of(tmp_path, 3, *SEPARATE, *ONE_AT_A_TIME, program=FULLY_ASYNC, rollout="sglang")
    assert all(difference < SAME for difference in differences(steps)), differences(steps)
    assert is_learning(steps)


def test_router_replay_of_sglangs_routes_brings_log_probs_together(tmp_path):
    """R3 against the same seed without it; both have the same weights, prompts and seeds in the first step."""
    write_model(tmp_path / "plain", 1)
    model, found = with_near_ties(tmp_path / "plain", tmp_path / "near_ties"), []
    for name, settings in (("native", BFLOAT16), ("replayed", [*BFLOAT16, *REPLAY, _ROUTES_AS_TEXT])):
        options = ["--rollout", "sglang", "--model", model, *overrides(*settings)]
        found.append(finished(tmp_path / name, 2, *options).steps()[0])
    native, replayed = found
    assert "actor/router_replay_differing" not in native
    assert replayed["actor/router_replay_differing"] > 0.02
    for metric in ("training/rollout_probs_diff_mean", "rollout_corr/k3_kl"):
        assert replayed[metric] < native[metric], (metric, native[metric], replayed[metric])
